// In which forwards a layer on GPUs quantizes its rows before they travel.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "../ranks/ranks.h"
#include "layer/agreement.h"
#include "layer/rank_step.h"
#include "layer/row_choice.h"
#include "row_configs.h"

namespace fusedmoe::quantized_rows_test {

using testing::rank_config;

constexpr std::int64_t kMost = testing::kMostRows;

RankOptions options_of(std::int64_t most = kMost) {
  RankOptions options;
  options.max_tokens_per_rank = most;
  return options;
}

ExpertPlacement placement_of(const MoeConfig& config) {
  return ExpertPlacement::linear(256, static_cast<int>(config.parallel.ep_size));
}

std::int64_t least(const MoeConfig& config, std::int64_t most = kMost) {
  return layer::least_quantized(default_rank_costs(), config, options_of(most),
                                placement_of(config));
}

layer::PredictedRows predict(const MoeConfig& config, std::int64_t tokens,
                             RowPath path = RowPath::kPeerMemory) {
  return layer::predict_rows(default_rank_costs(), config, options_of(), placement_of(config), path,
                             CombineMode::kPerRank, tokens);
}

/// Dispatch and combine of 7168 columns and top-8, fp8_block, in bf16 and in E4M3, us.
TEST(QuantizedRowsTest, WhatIsSavedIsWhatH200sWereMeasuredToSave) {
  struct Measured {
    int ranks;
    std::int64_t tokens;
    double bf16_us, e4m3_us;
  };
  for (const Measured& row :
       {Measured{2, 8, 14.2, 21}, Measured{2, 128, 26, 30.4}, Measured{2, 2048, 215, 187},
        Measured{2, 8192, 786, 670}, Measured{4, 8, 16.4, 23.2}, Measured{4, 128, 50, 48.9},
        Measured{4, 1024, 279, 231}, Measured{4, 8192, 2124, 1679}}) {
    SCOPED_TRACE(std::to_string(row.ranks) + " ranks, " + std::to_string(row.tokens));
    MoeConfig config = rank_config(row.ranks, "fp8_block");
    config.dispatch_dtype = DType::kBF16;
    const layer::PredictedRows bf16 = predict(config, row.tokens);
    config.dispatch_dtype = DType::kE4M3;
    const layer::PredictedRows e4m3 = predict(config, row.tokens);
    EXPECT_EQ(bf16.quantize_us, 0);
    EXPECT_GT(e4m3.quantize_us, 7);
    const double saved = row.bf16_us - row.e4m3_us;
    EXPECT_NEAR(bf16.us() - e4m3.us(), saved, 2 + 0.1 * std::abs(saved));
  }
}

TEST(QuantizedRowsTest, RowsOfEnoughTokensAreQuantized) {
  EXPECT_GT(least(rank_config(2, "fp8_block")), 128);
  EXPECT_LT(least(rank_config(2, "fp8_block")), 1024);
  EXPECT_GT(least(rank_config(4, "fp8_block")), 32);
  EXPECT_LT(least(rank_config(4, "fp8_block")), 160);
  EXPECT_EQ(least(rank_config(1, "fp8_block")), 0) << "nothing travels";
  EXPECT_LT(least(rank_config(8, "fp8_block")), least(rank_config(4, "fp8_block")));
  EXPECT_LT(least(rank_config(2, "mxfp4:ocp")), least(rank_config(2, "fp8_block")))
      << "codes of 4 bits";
  const std::int64_t from = least(rank_config(2, "fp8_block"));
  EXPECT_EQ(least(rank_config(2, "fp8_block"), from), from);
  EXPECT_EQ(least(rank_config(2, "fp8_block"), from - 1), 0);
}

/// The numbers of docs/expert-parallel.md.
TEST(QuantizedRowsTest, AsManyTokensAsThePageSays) {
  const struct {
    int num_ranks;
    std::int64_t quantized, beside;
  } rows[] = {{2, 450, 2211}, {4, 129, 727}, {8, 72, 417}};
  for (const auto& [num_ranks, quantized, beside] : rows) {
    const MoeConfig config = rank_config(num_ranks, "fp8_block");
    EXPECT_EQ(least(config), quantized);
    EXPECT_EQ(layer::least_beside_experts(default_rank_costs(), config, options_of(),
                                          placement_of(config)),
              beside);
  }
}

TEST(QuantizedRowsTest, WhatIsPredictedIsTheFaster) {
  const MoeConfig open = rank_config(4, "fp8_block");
  MoeConfig bf16 = open, e4m3 = open;
  bf16.dispatch_dtype = DType::kBF16;
  e4m3.dispatch_dtype = DType::kE4M3;
  const std::int64_t from = least(open);
  for (const std::int64_t tokens : {from - 1, from}) {
    const bool quantized = tokens == from;
    const layer::PredictedRows rows = predict(open, tokens);
    EXPECT_EQ(rows.quantize_us > 0, quantized) << tokens;
    EXPECT_EQ(rows.dispatch_us, predict(quantized ? e4m3 : bf16, tokens).dispatch_us);
    EXPECT_LE(rows.dispatch_us, predict(quantized ? bf16 : e4m3, tokens).dispatch_us);
  }
  EXPECT_EQ(predict(open, kMost, RowPath::kAll2all).quantize_us, 0) << "messages";
  EXPECT_GT(predict(e4m3, kMost, RowPath::kAll2all).quantize_us, 0);
}

TEST(QuantizedRowsTest, ExpertsMustQuantizeEachRowByItself) {
  for (const char* scheme : {"fp8_block", "fp8_channel_token", "fp8_tensor_static", "w4a8", "mxfp8",
                             "mxfp4_mxfp8", "mxfp4:ocp"}) {
    EXPECT_TRUE(layer::may_travel_quantized(rank_config(2, scheme))) << scheme;
  }
  for (const char* scheme : {"bf16", "mxfp4_w4a16", "nvfp4", "fp8_tensor", "int8_w8a8"}) {
    EXPECT_FALSE(layer::may_travel_quantized(rank_config(2, scheme))) << scheme;
    EXPECT_EQ(least(rank_config(8, scheme)), 0) << scheme;
  }
  const auto may_changed = [](const auto& change) {
    MoeConfig config = rank_config(2, "fp8_block");
    change(config);
    return layer::may_travel_quantized(config);
  };
  EXPECT_FALSE(may_changed([](auto& config) { config.dispatch_dtype = DType::kBF16; }));
  EXPECT_FALSE(may_changed([](auto& config) { config.dispatch_dtype = DType::kE4M3; }));
  EXPECT_FALSE(may_changed([](auto& config) { config.hooks = true; }));
  EXPECT_FALSE(may_changed([](auto& config) { config.device = {}; }));
}

/// Rows that the experts quantize come before them.
TEST(QuantizedRowsTest, RowsBesideTheExpertsAreThoseThatTravelQuantized) {
  const auto beside = [](const RankCosts& costs, std::optional<DType> dtype,
                         std::int64_t most = kMost, const char* scheme = "fp8_block") {
    MoeConfig config = rank_config(4, scheme);
    config.dispatch_dtype = dtype;
    return layer::least_beside_experts(costs, config, options_of(most), placement_of(config));
  };
  RankCosts costs = default_rank_costs();
  const std::int64_t e4m3 = beside(costs, DType::kE4M3);
  EXPECT_GT(e4m3, 0);
  EXPECT_EQ(beside(costs, DType::kBF16), 0);
  EXPECT_EQ(beside(costs, {}, kMost, "nvfp4"), 0);
  EXPECT_EQ(beside(costs, {}), e4m3);
  EXPECT_EQ(beside(costs, {}, e4m3 - 1), 0);
  costs.quantize.floor_us = 150;
  const MoeConfig config = rank_config(4, "fp8_block");
  const std::int64_t quantized =
      layer::least_quantized(costs, config, options_of(), placement_of(config));
  EXPECT_GT(quantized, e4m3);
  EXPECT_EQ(beside(costs, {}), quantized);
  costs.quantize.floor_us = 1e9;
  EXPECT_EQ(beside(costs, {}), 0);
}

/// The rules of a layer that takes peer memory up to 4000 tokens, and quantizes from 300 on.
template <typename Function>
void with_rules(const MoeConfig& config, const Function& function) {
  const auto ranks = make_thread_communicators(2, {testing::kPatient});
  testing::run_ranks(2, [&](int rank) {
    MoeConfig here = config;
    here.device = {};
    Context context;
    context.ranks.communicator = ranks[rank];
    context.ranks.max_tokens_per_rank = kMost;
    layer::RankRules rules(here, context, false);
    rules.way = layer::RowWay::kPeerMemory;
    rules.peer_tokens = 4000;
    rules.quantized_from = 300;
    function(rules);
  });
}

ProblemSize problem_of(const MoeConfig& config, std::int64_t tokens) {
  ProblemSize problem = ProblemSize::of(config, tokens);
  problem.max_tokens = tokens;
  return problem;
}

constexpr Preparation kTakesCodes{.takes_quantized = true, .from_sources = true};

TEST(QuantizedRowsTest, StepsOfEnoughTokensQuantize) {
  MoeConfig config = rank_config(2, "fp8_block");
  with_rules(config, [&](layer::RankRules& rules) {
    const auto quantizes = [&](std::int64_t tokens, const Preparation& read = kTakesCodes) {
      const layer::StepSizes sizes(rules, problem_of(config, tokens), read);
      EXPECT_FALSE(sizes.converts) << tokens;
      return sizes.sent.quant == config.scheme.activations;
    };
    EXPECT_FALSE(quantizes(299));
    EXPECT_TRUE(quantizes(300));
    EXPECT_TRUE(quantizes(4000));
    EXPECT_FALSE(quantizes(4001)) << "messages";
    EXPECT_FALSE(quantizes(300, {})) << "experts that take no codes";
    EXPECT_TRUE(quantizes(1, {.quant = config.scheme.activations})) << "experts that need them";
    rules.quantized_from = 0;
    EXPECT_FALSE(quantizes(4000));
  });
  config.dispatch_dtype = DType::kBF16;
  with_rules(config, [&](layer::RankRules& rules) {
    EXPECT_FALSE(rules.sent_as(kTakesCodes, 300).quant) << "it was asked for";
  });
  config.dispatch_dtype = DType::kE4M3;
  with_rules(config, [&](layer::RankRules& rules) {
    EXPECT_TRUE(rules.sent_as(kTakesCodes, 299).quant) << "it was asked for";
  });
}

/// Rows in bf16 take more than as many codes.
TEST(QuantizedRowsTest, WorkspacesServeFewerTokensToo) {
  const MoeConfig config = rank_config(2, "fp8_block");
  with_rules(config, [&](layer::RankRules& rules) {
    const auto needs = [&](std::int64_t tokens) {
      const layer::StepSizes sizes(rules, problem_of(config, tokens), kTakesCodes);
      return layer::RankStep::make(rules, sizes, nullptr)->bytes();
    };
    const auto has = [&](std::int64_t tokens) {
      return layer::RankStep::workspace_bytes(rules, problem_of(config, tokens), kTakesCodes);
    };
    EXPECT_LT(needs(300), needs(299));
    EXPECT_EQ(has(299), needs(299));
    EXPECT_EQ(has(300), needs(299));
    EXPECT_EQ(has(3000), needs(3000));
    std::size_t before = 0;
    for (std::int64_t tokens = 290; tokens < 700; ++tokens) {
      EXPECT_GE(has(tokens), needs(tokens)) << tokens;
      EXPECT_GE(has(tokens), before) << tokens;
      before = has(tokens);
    }
    rules.quantized_from = 1;
    EXPECT_EQ(has(300), needs(300)) << "all are quantized";
    // Those that experts bring beside them take no room here.
    rules.beside_from = 300;
    EXPECT_LT(needs(300), needs(299));
    EXPECT_EQ(has(300), needs(299));
    EXPECT_EQ(has(4000), std::max(needs(299), needs(4000)));
    before = 0;
    for (std::int64_t tokens = 290; tokens < 4000; tokens += 7) {
      EXPECT_GE(has(tokens), needs(tokens)) << tokens;
      EXPECT_GE(has(tokens), before) << tokens;
      before = has(tokens);
    }
    rules.quantized_from = 0;
    EXPECT_EQ(has(300), needs(300)) << "bf16 rows do not come beside experts that quantize";
  });
}

TEST(QuantizedRowsTest, WhatExpertsLeaveGoesToTargetsThroughPeerMemoryAlone) {
  const MoeConfig config = rank_config(2, "fp8_block");
  with_rules(config, [&](layer::RankRules& rules) {
    const auto goes = [&](std::int64_t tokens, bool to_targets) {
      const Preparation read{.to_targets = to_targets};
      return layer::StepSizes(rules, problem_of(config, tokens), read).to_targets;
    };
    EXPECT_TRUE(goes(4000, true));
    EXPECT_FALSE(goes(4000, false)) << "experts that cannot";
    EXPECT_FALSE(goes(4001, true)) << "messages";
  });
}

TEST(QuantizedRowsTest, ThePlanSaysFromHowManyTokensOn) {
  with_rules(rank_config(2, "fp8_block"), [&](layer::RankRules& rules) {
    rules.peer_tokens = kMost;
    const std::string peers = rules.rows_travel({});
    EXPECT_EQ(rules.rows_travel(kTakesCodes), peers + "; quantized from 300 tokens on");
    rules.beside_from = 900;
    EXPECT_EQ(rules.rows_travel(kTakesCodes),
              peers + "; quantized from 300 tokens on; beside the experts from 900 tokens on");
    rules.quantized_from = 0;
    EXPECT_EQ(rules.rows_travel(kTakesCodes), peers + "; beside the experts from 900 tokens on");
    rules.no_messages = "messages are predicted to be faster, but ...";
    EXPECT_EQ(rules.rows_travel({}), peers + "; " + rules.no_messages);
    rules.no_messages.clear();
    rules.peer_tokens = 4000;
    EXPECT_EQ(rules.rows_travel(kTakesCodes),
              peers +
                  " up to 4000 tokens, then messages over threads, which are predicted to be "
                  "faster; beside the experts from 900 tokens on");
  });
}

/// Also where nothing else is left to them: all ranks must quantize in the same forwards.
TEST(QuantizedRowsTest, LayersCompareTheCosts) {
  const auto leaves = [](const char* scheme, const auto& change) {
    MoeConfig config = rank_config(2, scheme);
    RankOptions options = options_of();
    options.communicator = make_thread_communicators(1, {testing::kPatient}).front();
    options.combine = CombineMode::kPerRank;
    options.lanes = 2;
    change(config);
    return layer::leaves_choice(config, options, RowPath::kAll2all);
  };
  EXPECT_TRUE(leaves("fp8_block", [](auto&) {}));
  EXPECT_TRUE(leaves("fp8_block", [](auto& config) { config.combine = CombineMode::kPerSlot; }));
  EXPECT_FALSE(leaves("fp8_block", [](auto& config) { config.dispatch_dtype = DType::kE4M3; }));
  EXPECT_FALSE(leaves("fp8_block", [](auto& config) { config.hooks = true; }));
  EXPECT_FALSE(leaves("bf16", [](auto&) {}));
}

TEST(QuantizedRowsTest, SimulationsChooseAsLayersDo) {
  for (const int ranks : {16, 17}) {
    const MoeConfig many = rank_config(ranks, "bf16");
    EXPECT_EQ(layer::simulated_rows(many, options_of(), {}, placement_of(many)).path,
              ranks == 16 ? RowPath::kPeerMemory : RowPath::kAll2all);
  }
  MoeConfig config = rank_config(4, "fp8_block");
  SimulatedLayer layer = layer::simulated_rows(config, options_of(), {}, placement_of(config));
  EXPECT_EQ(layer.sent_row_bytes, 14336);
  EXPECT_EQ(layer.quantized_row_bytes, 7392);
  Tensor ids = Tensor::empty({1, 8}, DType::kI32);
  for (int i = 0; i < 8; ++i) ids.as<std::int32_t>()[i] = 0;  // all rows go to one rank
  const RankCosts costs = default_rank_costs();
  for (const std::int64_t tokens : {least(config) - 1, least(config)}) {
    layer.tokens_per_rank = tokens;
    const SimulatedStep step = simulate(costs, layer, ids);
    const bool quantized = tokens == least(config);
    const auto rows = static_cast<double>(3 * tokens), of_rank = static_cast<double>(tokens);
    EXPECT_EQ(step.inside_bytes, rows * (quantized ? 7392 : 14336));
    EXPECT_EQ(step.quantize_us, quantized ? 7 + of_rank * (14336 + 7392) / 3e6 : 0);
    EXPECT_DOUBLE_EQ(step.dispatch_us,
                     costs.peer_memory.dispatch.us(step.inside_bytes) + step.quantize_us);
  }
  layer.num_hosts = 2;
  layer.tokens_per_rank = kMost;
  EXPECT_EQ(simulate(costs, layer, 8).quantize_us, 0) << "messages";
  config.device = {};
  config.dispatch_dtype = DType::kE4M3;
  layer = layer::simulated_rows(config, options_of(), {}, placement_of(config));
  EXPECT_EQ(layer.sent_row_bytes, 7392) << "whose experts quantize in any case";
  EXPECT_EQ(layer.quantized_row_bytes, 0);
}

}  // namespace fusedmoe::quantized_rows_test
