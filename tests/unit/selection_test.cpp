// The registry, the candidate table, and a require that fails instead of degrading.
#include "fusedmoe/selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace fusedmoe {
namespace {

MoeConfig gpt_oss_config() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 32;
  config.topk = 4;
  config.hidden = config.intermediate = 2880;
  config.scheme = schemes::mxfp4_w4a16();
  config.activation = Activation::kSwigluOai;
  config.has_bias = true;
  config.routing_method = RoutingMethod::kRenormalize;
  return config;
}

const Candidate* find(const Selection& selection, std::string_view experts,
                      std::string_view prepare_finalize) {
  for (const Candidate& candidate : selection.candidates) {
    if (candidate.experts->name() == experts &&
        candidate.prepare_finalize->name() == prepare_finalize) {
      return &candidate;
    }
  }
  return nullptr;
}

std::string error_text(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(RegistryTest, NamesAreUniqueAndInOrderOfPreference) {
  std::vector<std::string_view> names;
  std::set<std::string_view> unique;
  for (const auto& experts : all_experts()) {
    EXPECT_TRUE(unique.insert(experts->name()).second) << experts->name();
    if (testing::runs_on_cpu(*experts)) names.push_back(experts->name());
  }
  EXPECT_TRUE(all_experts().back()->is_reference());
  EXPECT_EQ(names, (std::vector<std::string_view>{"cpu", "cpu_batched", "cpu_monolithic",
                                                  "cpu_unfused", "reference", "reference_batched",
                                                  "reference_monolithic", "reference_unfused"}));
  std::vector<std::string_view> transports;
  for (const auto& object : all_prepare_finalize()) transports.push_back(object->name());
  EXPECT_EQ(transports, (std::vector<std::string_view>{"no_ep", "batched"}));
}

TEST(SelectionTest, TakesTheFastModularExperts) {
  const Selection selection = select(gpt_oss_config());
  ASSERT_TRUE(selection);
  EXPECT_EQ(selection.experts->name(), "cpu");
  EXPECT_EQ(selection.prepare_finalize->name(), "no_ep");
}

TEST(SelectionTest, EveryPairIsACandidateOnceAndOneIsChosen) {
  const Selection selection = explain(gpt_oss_config());
  EXPECT_EQ(selection.candidates.size(), all_experts().size() * all_prepare_finalize().size());
  std::set<std::pair<const void*, const void*>> pairs;
  int chosen = 0;
  for (const Candidate& candidate : selection.candidates) {
    pairs.emplace(candidate.experts.get(), candidate.prepare_finalize.get());
    chosen += candidate.chosen;
    EXPECT_EQ(candidate.support.text.empty(), static_cast<bool>(candidate.support))
        << "a no has a text: " << candidate.experts->name();
    const bool same_format =
        candidate.experts->activation_format() == candidate.prepare_finalize->activation_format();
    EXPECT_EQ(candidate.support.reason == Reason::kPairing, !same_format);
  }
  EXPECT_EQ(pairs.size(), selection.candidates.size());
  EXPECT_EQ(chosen, 1);
  EXPECT_TRUE(find(selection, "cpu", "no_ep")->chosen);
}

TEST(SelectionTest, FormatIsAWish) {
  MoeConfig config = gpt_oss_config();
  Selection selection = explain(config);
  EXPECT_EQ(find(selection, "cpu_batched", "batched")->support.reason, Reason::kActivationFormat);

  config.activation_format = ActivationFormat::kBatchedExperts;
  selection = select(config);
  EXPECT_EQ(selection.experts->name(), "cpu_batched");
  EXPECT_EQ(selection.prepare_finalize->name(), "batched");
  EXPECT_EQ(find(selection, "cpu", "no_ep")->support.reason, Reason::kActivationFormat);
}

TEST(SelectionTest, RequireTakesEveryImplementationThatFits) {
  const MoeConfig config = gpt_oss_config();
  for (const auto& experts : all_experts()) {
    if (!testing::runs_on_cpu(*experts)) {
      EXPECT_NE(error_text([&] { select(config, experts->name()); }).find("(device is cpu"),
                std::string::npos);
      continue;
    }
    const Selection selection = select(config, experts->name());
    EXPECT_EQ(selection.experts, experts);
    EXPECT_EQ(selection.prepare_finalize->activation_format(), experts->activation_format());
    int chosen = 0;
    for (const Candidate& candidate : selection.candidates) {
      chosen += candidate.chosen;
      if (candidate.chosen) {
        EXPECT_EQ(candidate.experts, experts);
      }
    }
    EXPECT_EQ(chosen, 1);
  }
  const Selection pair = select(config, "cpu_batched+batched");
  EXPECT_EQ(pair.experts->name(), "cpu_batched");
  EXPECT_EQ(pair.prepare_finalize->name(), "batched");
}

TEST(SelectionTest, RequireOfAnUnknownNameListsTheNames) {
  std::string text = error_text([] { select(gpt_oss_config(), "gpu"); });
  for (const auto& experts : all_experts()) {
    EXPECT_NE(text.find(experts->name()), std::string::npos) << text;
  }
  EXPECT_NE(text.find("\"gpu\""), std::string::npos) << text;

  text = error_text([] { select(gpt_oss_config(), "cpu+deepep"); });
  EXPECT_NE(text.find("deepep"), std::string::npos) << text;
  EXPECT_NE(text.find("no_ep, batched"), std::string::npos) << text;
  EXPECT_NE(error_text([] { select(gpt_oss_config(), "cpu+"); }), "");
  EXPECT_NE(error_text([] { select(gpt_oss_config(), "+no_ep"); }), "");
  EXPECT_NE(error_text([] { select(gpt_oss_config(), "CPU"); }), "");
}

TEST(SelectionTest, RequireFailsWithTheReasonInsteadOfDegrading) {
  std::string text = error_text([] { select(gpt_oss_config(), "cpu+batched"); });
  EXPECT_NE(text.find("pairing"), std::string::npos) << text;

  MoeConfig config = gpt_oss_config();
  config.scheme.weights.group = {1, 17};
  text = error_text([&] { select(config, "reference"); });
  EXPECT_NE(text.find("reference+no_ep"), std::string::npos) << text;
  EXPECT_NE(text.find("quant_scheme"), std::string::npos) << text;

  config = gpt_oss_config();
  config.topk = 1;
  config.apply_router_weight_on_input = true;
  EXPECT_EQ(select(config).experts->name(), "cpu");
  text = error_text([&] { select(config, "cpu_monolithic"); });
  EXPECT_NE(text.find("router_weight_on_input"), std::string::npos) << text;
}

TEST(SelectionTest, NothingFitsIsAnErrorWithTheWholeTable) {
  MoeConfig config = gpt_oss_config();
  config.device = {DeviceKind::kCuda, 999};
  const Selection selection = explain(config);
  EXPECT_FALSE(selection);
  EXPECT_EQ(selection.prepare_finalize, nullptr);
  for (const Candidate& candidate : selection.candidates) {
    EXPECT_EQ(candidate.support.reason, Reason::kDevice);
    EXPECT_NE(candidate.support.text.find("cuda:999"), std::string::npos);
  }
  const std::string text = error_text([&] { select(config); });
  EXPECT_NE(text.find(selection.table()), std::string::npos) << text;
  EXPECT_NE(text.find("mxfp4_w4a16"), std::string::npos) << text;
}

TEST(SelectionTest, ReasonsNameWhatFailed) {
  const auto reason = [](const std::function<void(MoeConfig&)>& change) {
    MoeConfig config = gpt_oss_config();
    change(config);
    const Selection selection = explain(config);
    EXPECT_FALSE(selection);
    return find(selection, "reference", "no_ep")->support.reason;
  };
  EXPECT_EQ(reason([](MoeConfig& c) { c.dtype = DType::kI8; }), Reason::kDType);
  EXPECT_EQ(reason([](MoeConfig& c) { c.scheme.weights.value = DType::kE5M2; }),
            Reason::kQuantScheme);
  EXPECT_EQ(reason([](MoeConfig& c) { c.activation = Activation::kSitu; }), Reason::kActivation);
  EXPECT_EQ(reason([](MoeConfig& c) { c.parallel.ep_size = 4; }), Reason::kParallelConfig);
  EXPECT_EQ(reason([](MoeConfig& c) { c.apply_router_weight_on_input = true; }),
            Reason::kRouterWeightOnInput);
}

TEST(SelectionTest, HooksChooseUnfusedExperts) {
  MoeConfig config = gpt_oss_config();
  config.hooks = true;
  const Selection selection = explain(config);
  EXPECT_EQ(selection.experts->name(), "cpu_unfused");
  for (const Candidate& candidate : selection.candidates) {
    if (candidate.support.reason == Reason::kPairing) continue;
    EXPECT_EQ(static_cast<bool>(candidate.support),
              candidate.experts->has_hooks() && testing::runs_on_cpu(*candidate.experts));
  }
  EXPECT_EQ(find(selection, "reference", "no_ep")->support.reason, Reason::kHooks);
}

TEST(SelectionTest, MonolithicExpertsMustKnowTheRoutingMethod) {
  MoeConfig config = gpt_oss_config();
  config.routing_method = RoutingMethod::kUnspecified;
  const Selection selection = explain(config);
  EXPECT_EQ(find(selection, "cpu_monolithic", "no_ep")->support.reason, Reason::kRoutingMethod);
  EXPECT_TRUE(find(selection, "cpu", "no_ep")->support);
}

TEST(SelectionTest, BatchInvarianceRefusesDynamicScalesPerTensor) {
  MoeConfig config = gpt_oss_config();
  config.batch_invariant = true;
  EXPECT_TRUE(explain(config));
  config.scheme = parse_scheme("fp8_tensor");
  const Selection selection = explain(config);
  EXPECT_FALSE(selection);
  EXPECT_EQ(find(selection, "reference", "no_ep")->support.reason, Reason::kBatchInvariance);
}

TEST(SelectionTest, TableHasARowPerCandidate) {
  const Selection selection = explain(gpt_oss_config());
  const std::string table = selection.table();
  EXPECT_EQ(static_cast<std::size_t>(std::count(table.begin(), table.end(), '\n')),
            selection.candidates.size() + 1);
  EXPECT_EQ(std::count(table.begin(), table.end(), '*'), 1);
  EXPECT_EQ(table.find(" \n"), std::string::npos) << "no trailing blanks";
  EXPECT_NE(table.find("\n*  cpu "), std::string::npos) << table;
}

TEST(SelectionTest, JsonHoldsTheSame) {
  const Selection selection = explain(gpt_oss_config());
  const auto rows = nlohmann::json::parse(selection.json());
  ASSERT_EQ(rows.size(), selection.candidates.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Candidate& candidate = selection.candidates[i];
    EXPECT_EQ(rows[i]["experts"], candidate.experts->name());
    EXPECT_EQ(rows[i]["prepare_finalize"], candidate.prepare_finalize->name());
    EXPECT_EQ(rows[i]["activation_format"], name(candidate.experts->activation_format()));
    EXPECT_EQ(rows[i]["monolithic"], candidate.experts->is_monolithic());
    EXPECT_EQ(rows[i]["supported"], static_cast<bool>(candidate.support));
    EXPECT_EQ(rows[i]["code"], code(candidate.support.reason));
    EXPECT_EQ(rows[i]["reason"], candidate.support.text);
    EXPECT_EQ(rows[i]["chosen"], candidate.chosen);
  }
}

TEST(SelectionTest, CodesAndNamesAreDistinct) {
  std::set<std::string_view> codes;
  for (int i = 0; i <= static_cast<int>(Reason::kPairing); ++i) {
    codes.insert(code(static_cast<Reason>(i)));
  }
  EXPECT_EQ(codes.size(), static_cast<std::size_t>(Reason::kPairing) + 1);
  EXPECT_EQ(codes.count("unknown"), 0u);
  std::set<std::string_view> kinds;
  for (int i = 0; i <= static_cast<int>(WeightAndReduce::kDelegate); ++i) {
    kinds.insert(name(static_cast<WeightAndReduce>(i)));
  }
  EXPECT_EQ(kinds.size(), 4u);
}

TEST(SelectionTest, EveryCandidateThatSaysYesRuns) {
  testing::Case spec;
  spec.num_tokens = 3;
  const testing::Problem problem = testing::make_problem(spec);
  for (const auto format : {ActivationFormat::kStandard, ActivationFormat::kBatchedExperts}) {
    MoeConfig config = testing::make_config(spec, DType::kBF16);
    config.activation_format = format;
    int ran = 0;
    for (const Candidate& candidate : explain(config).candidates) {
      if (!candidate.support) continue;
      SCOPED_TRACE(candidate.experts->name());
      const auto packed = candidate.experts->pack(problem.weights);
      EXPECT_NO_THROW(testing::run_experts(problem, *candidate.prepare_finalize, *candidate.experts,
                                           *packed, DType::kBF16));
      ++ran;
    }
    EXPECT_EQ(ran, format == ActivationFormat::kStandard ? 6 : 2);
  }
}

TEST(WorkspacePlanTest, PartsAreRoundedUpTo256Bytes) {
  WorkspacePlan plan;
  EXPECT_EQ(plan.common_bytes(), 0u);
  EXPECT_EQ(plan.total_bytes(), 0u);
  plan.workspace13_bytes = 1;
  plan.workspace2_bytes = 257;
  plan.output_shape = {3, 5};
  plan.output_dtype = DType::kBF16;
  EXPECT_EQ(plan.common_bytes(), 30u) << "the output is larger than workspace13";
  EXPECT_EQ(plan.total_bytes(), 256u + 512u);
  plan.workspace13_bytes = 300;
  EXPECT_EQ(plan.common_bytes(), 300u);
  EXPECT_EQ(plan.total_bytes(), 512u + 512u);
}

}  // namespace
}  // namespace fusedmoe
