// The registry, the candidate table, and a require that fails instead of degrading.
#include "fusedmoe/selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "error_text.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace fusedmoe::selection_test {

MoeConfig gpt_oss_config() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 32;
  config.topk = 4;
  config.hidden = config.intermediate = 2880;
  config.scheme = schemes::mxfp4_w4a16();
  config.activation = Activation::kSwigluOai;
  config.has_bias = true;
  config.routing_method = RoutingMethod::kRouter;
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

using testing::error_text;

TEST(RegistryTest, NamesAreUniqueAndInOrderOfPreference) {
  std::vector<std::string_view> names;
  std::set<std::string_view> unique;
  for (const ExpertsDescriptor* experts : all_experts()) {
    EXPECT_TRUE(unique.insert(experts->name()).second) << experts->name();
    EXPECT_EQ(experts->on_request_only(), experts->name() == "reference");
    names.push_back(experts->name());
  }
  EXPECT_EQ(names, (std::vector<std::string_view>{"cpu", "sm90", "sm89", "sm80", "reference"}));
  std::vector<std::string_view> transports;
  for (const PrepareFinalizeDescriptor* object : all_prepare_finalize()) {
    transports.push_back(object->name());
  }
  EXPECT_EQ(transports, (std::vector<std::string_view>{"no_ep", "batched", "all2all",
                                                       "allgather_reducescatter"}));
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
    pairs.emplace(candidate.experts, candidate.prepare_finalize);
    chosen += candidate.chosen;
    EXPECT_NE(candidate.support.text, "") << candidate.experts->name();
  }
  EXPECT_EQ(pairs.size(), selection.candidates.size());
  EXPECT_EQ(chosen, 1);
  EXPECT_TRUE(find(selection, "cpu", "no_ep")->chosen);
}

TEST(SelectionTest, FormatIsAWish) {
  MoeConfig config = gpt_oss_config();
  Selection selection = explain(config);
  EXPECT_EQ(find(selection, "cpu", "batched")->support.reason, Reason::kActivationFormat);

  config.activation_format = ActivationFormat::kBatchedExperts;
  selection = select(config);
  EXPECT_EQ(selection.pair(), "cpu+batched");
  EXPECT_EQ(find(selection, "cpu", "no_ep")->support.reason, Reason::kActivationFormat);
}

TEST(SelectionTest, RequireTakesEveryImplementationThatFits) {
  const MoeConfig config = gpt_oss_config();
  for (const ExpertsDescriptor* experts : all_experts()) {
    if (experts->name().starts_with("sm")) {
      EXPECT_NE(error_text([&] { select(config, experts->name()); }).find("device"),
                std::string::npos);
      continue;
    }
    const Selection selection = select(config, experts->name());
    EXPECT_EQ(selection.experts, experts);
    EXPECT_EQ(selection.prepare_finalize, &no_ep());
    int chosen = 0;
    for (const Candidate& candidate : selection.candidates) {
      chosen += candidate.chosen;
      if (candidate.chosen) {
        EXPECT_EQ(candidate.experts, experts);
      }
    }
    EXPECT_EQ(chosen, 1);
  }
  EXPECT_EQ(select(config, "cpu+batched").pair(), "cpu+batched");
  EXPECT_EQ(select(config, "cpu+batched").config.activation_format,
            ActivationFormat::kBatchedExperts);
  EXPECT_EQ(select(config, "reference+batched").pair(), "reference+batched");
}

TEST(SelectionTest, RequireOfAnUnknownNameListsTheNames) {
  std::string text = error_text([] { select(gpt_oss_config(), "gpu"); });
  for (const ExpertsDescriptor* experts : all_experts()) {
    EXPECT_NE(text.find(experts->name()), std::string::npos) << text;
  }
  EXPECT_NE(text.find("gpu"), std::string::npos) << text;

  text = error_text([] { select(gpt_oss_config(), "cpu+deepep"); });
  EXPECT_NE(text.find("deepep"), std::string::npos) << text;
  EXPECT_NE(text.find("no_ep, batched"), std::string::npos) << text;
  EXPECT_NE(error_text([] { select(gpt_oss_config(), "cpu+"); }), "");
  EXPECT_NE(error_text([] { select(gpt_oss_config(), "+no_ep"); }), "");
  EXPECT_NE(error_text([] { select(gpt_oss_config(), "CPU"); }), "");
}

TEST(SelectionTest, RequireFailsWithTheReasonInsteadOfDegrading) {
  MoeConfig config = gpt_oss_config();
  config.hooks = true;
  std::string text = error_text([&] { select(config, "cpu+batched"); });
  EXPECT_NE(text.find("injection points"), std::string::npos) << text;

  config = gpt_oss_config();
  config.scheme.weights.group = {1, 17};
  text = error_text([&] { select(config, "reference"); });
  EXPECT_NE(text.find("reference+no_ep"), std::string::npos) << text;
  EXPECT_NE(text.find("quant_scheme"), std::string::npos) << text;

  config = gpt_oss_config();
  config.topk = 1;
  config.apply_router_weight_on_input = true;
  EXPECT_EQ(select(config).experts->name(), "cpu");
  config.monolithic = true;
  text = error_text([&] { select(config, "cpu"); });
  EXPECT_NE(text.find("router_weight_on_input"), std::string::npos) << text;
}

TEST(SelectionTest, NothingFitsIsAnErrorWithEveryReason) {
  MoeConfig config = gpt_oss_config();
  config.device = {DeviceKind::kCuda, 999};
  const Selection selection = explain(config);
  EXPECT_FALSE(selection);
  EXPECT_EQ(selection.prepare_finalize, nullptr);
  for (const Candidate& candidate : selection.candidates) {
    EXPECT_EQ(candidate.support.reason, Reason::kDevice);
  }
  // One sentence says it: what the device lacks, not each row.
  std::string text = error_text([&] { select(config); });
  EXPECT_NE(text.find("cuda:999"), std::string::npos) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;

  config = gpt_oss_config();
  config.dtype = DType::kI8;
  text = error_text([&] { select(config); });
  for (const Candidate& candidate : explain(config).candidates) {
    EXPECT_NE(text.find(candidate.support.text), std::string::npos) << text;
  }
  EXPECT_NE(text.find("mxfp4_w4a16"), std::string::npos) << text;
}

TEST(SelectionTest, ImpossibleSizesAreRefusedForTheirShape) {
  const struct {
    std::int64_t topk, num_experts, num_local_experts;
    const char* text;
  } cases[] = {
      {0, 8, 8, "topk 0 of 8"},          {-1, 8, 8, "topk -1 of 8"},
      {9, 8, 8, "topk 9 of 8"},          {2, 8, 0, "0 local experts of 8"},
      {2, 8, 9, "9 local experts of 8"}, {1, 0, 0, "topk 1 of 0 experts"},
      {0, 0, 0, "topk 0 of 0 experts"},  {1, 524289, 524289, "a size of 524289; at most 524288"}};
  for (const auto& wrong : cases) {
    MoeConfig config = gpt_oss_config();
    config.topk = wrong.topk;
    config.num_experts = wrong.num_experts;
    config.num_local_experts = wrong.num_local_experts;
    const Selection selection = explain(config);
    EXPECT_FALSE(selection) << wrong.text;
    for (const char* experts : {"cpu", "reference"}) {
      const Support& support = find(selection, experts, "no_ep")->support;
      EXPECT_EQ(support.reason, Reason::kShape) << wrong.text;
      EXPECT_NE(support.text.find(wrong.text), std::string::npos) << support.text;
    }
  }
}

TEST(SelectionTest, TheReferenceIsChosenByNameOnly) {
  MoeConfig config = gpt_oss_config();
  config.scheme = parse_scheme("int8_w8a8");
  config.hidden = 1 << 17;  // too wide for int32 accumulators
  config.has_bias = false;
  const Selection selection = explain(config);
  EXPECT_FALSE(selection);
  EXPECT_EQ(selection.candidates.back().chosen, false);
  EXPECT_TRUE(find(selection, "reference", "no_ep")->support);
  const Support& refusal = find(selection, "cpu", "no_ep")->support;
  EXPECT_EQ(refusal.reason, Reason::kShape);
  EXPECT_NE(refusal.text.find("int32"), std::string::npos) << refusal.text;
  const std::string text = error_text([&] { select(config); });
  EXPECT_NE(text.find("int32"), std::string::npos) << text;
  EXPECT_EQ(select(config, "reference").pair(), "reference+no_ep");
}

TEST(SelectionTest, ANamedComputeCapabilityNeedsNoDevice) {
  MoeConfig config = gpt_oss_config();
  config.device = {DeviceKind::kCuda, 0};
  config.compute_capability = 90;
  const Selection hopper = explain(config);
  ASSERT_TRUE(hopper) << hopper.table();
  EXPECT_EQ(hopper.pair(), "sm90+no_ep");
  const ModularKernel kernel = hopper.create(make_context());
  EXPECT_EQ(kernel.experts().config().compute_capability, 90);
  EXPECT_GT(kernel.workspace_bytes(1), 0U);
  EXPECT_GT(kernel.workspace_bytes(64), kernel.workspace_bytes(1));
  if (const std::string problem = device_problem(config.device); !problem.empty()) {
    const std::string text = error_text([&] { kernel.experts().pack({}); });
    EXPECT_NE(text.find(problem), std::string::npos) << text;
  }
}

TEST(SelectionTest, EveryComputeCapabilitySinceAmpereHasExperts) {
  MoeConfig config = gpt_oss_config();
  config.device = {DeviceKind::kCuda, 0};
  for (const int capability : {80, 86, 87, 89, 90, 100, 103, 110, 120, 121}) {
    config.compute_capability = capability;
    const Selection selection = explain(config);
    ASSERT_TRUE(selection) << selection.table();
    EXPECT_EQ(selection.experts->name(), capability == 90 ? "sm90" : "sm80") << capability;
    std::vector<std::string> code{capability == 90  ? "bf16 by wgmma, machine code for 9.0"
                                  : capability < 90 ? "bf16 by mma.sync, machine code for 8.0"
                                                    : "bf16 by mma.sync, PTX for 8.0"};
    // Of wheels alone.
    if (capability >= 120) code.emplace_back("bf16 by mma.sync, machine code for 12.0");
    EXPECT_TRUE(std::any_of(code.begin(), code.end(), [&](const std::string& each) {
      return selection.table().find(each) != std::string::npos;
    })) << selection.table();
    // Every configuration has room: that of the kernel of one token, too.
    const ModularKernel kernel = selection.create(make_context());
    EXPECT_GT(kernel.workspace_bytes(8192), kernel.workspace_bytes(1)) << capability;
  }
  config.scheme = parse_scheme("fp8_block");
  for (const int capability : {80, 86, 87, 89, 90, 100}) {
    config.compute_capability = capability;
    const Selection selection = explain(config);
    ASSERT_TRUE(selection) << selection.table();
    const bool is_native = capability == 89;
    EXPECT_EQ(selection.experts->name(), is_native ? "sm89" : capability == 90 ? "sm90" : "sm80");
    EXPECT_NE(
        selection.table().find(is_native          ? "FP8 by mma.sync, machine code for 8.9"
                               : capability == 90 ? "FP8 by wgmma, machine code for 9.0"
                               : capability < 90  ? "FP8 as f16 by mma.sync, machine code for 8.0"
                                                  : "FP8 as f16 by mma.sync, PTX for 8.0"),
        std::string::npos)
        << selection.table();
  }
  EXPECT_EQ(find(explain(config), "sm89", "no_ep")->support.text,
            "compute capability 10.0, needs 8.9 or 12.x");
  config.compute_capability = 90;
  config.scheme = parse_scheme("int8_w8a8");
  const Selection integers = explain(config);
  EXPECT_EQ(integers.pair(), "sm80+no_ep") << "wgmma has no kernels of it";
  EXPECT_NE(integers.table().find("INT8 by mma.sync, PTX for 8.0"), std::string::npos)
      << integers.table();
  config.hidden = 1 << 17;  // too wide for int32 sums
  EXPECT_EQ(find(explain(config), "sm80", "no_ep")->support.reason, Reason::kShape);
  config = gpt_oss_config();
  config.device = {DeviceKind::kCuda, 0};
  config.compute_capability = 75;
  const Selection turing = explain(config);
  EXPECT_FALSE(turing);
  const auto text = [&](const char* experts) {
    return std::string(find(turing, experts, "no_ep")->support.text);
  };
  EXPECT_EQ(text("sm90"), "compute capability 7.5, needs 9.0");
  EXPECT_EQ(text("sm80"), "compute capability 7.5, needs 8.0 or later");
  EXPECT_EQ(find(turing, "sm80", "no_ep")->support.reason, Reason::kDevice);
}

TEST(SelectionTest, AComputeCapabilityIsThatOfAGpu) {
  MoeConfig config = gpt_oss_config();
  config.compute_capability = 90;
  for (const char* require : {"", "cpu", "reference+no_ep"}) {
    EXPECT_NE(error_text([&] {
                select(config, require);
              }).find("config.compute_capability cannot be used with config.device cpu: a GPU"),
              std::string::npos);
  }
  EXPECT_THROW(explain(config), Error);
}

// The same in builds with CUDA and without, and whatever GPU is here: those of an H200.
TEST(SelectionTest, HopperAnswersAreTheSameInEveryBuild) {
  struct Answer {
    const char *model, *scheme;
    bool hooks;
    std::int64_t num_tokens;
    std::size_t workspace_bytes;
    const char* kernel_config;
  };
  for (const Answer& answer : {
           Answer{"gpt-oss-20b", "mxfp4_w4a16", false, 1, 231168, "64x16k4c1 splits 2 f32"},
           Answer{"gpt-oss-20b", "mxfp4_mxfp8", false, 64, 14748416, "256x32k1c1 splits 1 f32"},
           Answer{"qwen3-30b-a3b", "bf16", false, 512, 78662144, "256x64k1c1 splits 1 bf16"},
           Answer{"qwen3-30b-a3b", "bf16", true, 512, 52464896, "256x64k1c1 splits 1 bf16"},
           Answer{"deepseek-v3", "fp8_block", false, 64, 65709568, "256x32k1c1 splits 1 f32"},
           Answer{"deepseek-v3", "w4a8", false, 4096, 906507776, "128x192k1c2 splits 1 bf16"},
       }) {
    MoeConfig config = moe_config(parse_model_config(model_preset(answer.model)), DType::kBF16,
                                  {DeviceKind::kCuda, 0});
    config.compute_capability = 90;
    config.scheme = parse_scheme(answer.scheme);
    config.hooks = answer.hooks;
    const ModularKernel kernel = select(config, "sm90+no_ep").create(Context());
    const ProblemSize size = ProblemSize::of(kernel.experts().config(), answer.num_tokens);
    EXPECT_EQ(kernel.workspace_bytes(answer.num_tokens), answer.workspace_bytes)
        << answer.model << " " << answer.scheme;
    EXPECT_EQ(kernel.experts().kernel_configs(size).front(), answer.kernel_config)
        << answer.model << " " << answer.scheme;
  }
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

TEST(SelectionTest, HooksNeedTheStandardFormat) {
  MoeConfig config = gpt_oss_config();
  config.hooks = true;
  const Selection selection = explain(config);
  EXPECT_EQ(selection.pair(), "cpu+no_ep");
  EXPECT_TRUE(find(selection, "reference", "no_ep")->support);
  for (const char* experts : {"cpu", "reference"}) {
    EXPECT_EQ(find(selection, experts, "batched")->support.reason, Reason::kHooks);
  }
}

TEST(SelectionTest, MonolithicExpertsMustKnowTheRoutingMethod) {
  MoeConfig config = gpt_oss_config();
  config.routing_method = RoutingMethod::kNone;
  EXPECT_TRUE(find(explain(config), "cpu", "no_ep")->support);
  config.monolithic = true;
  EXPECT_EQ(find(explain(config), "cpu", "no_ep")->support.reason, Reason::kRoutingMethod);
  config.routing_method = RoutingMethod::kRouter;
  EXPECT_EQ(explain(config).pair(), "cpu+no_ep");
  EXPECT_EQ(find(explain(config), "cpu", "batched")->support.reason, Reason::kActivationFormat);
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
    EXPECT_EQ(rows[i]["activation_format"], name(candidate.prepare_finalize->activation_format()));
    EXPECT_EQ(rows[i]["supported"], static_cast<bool>(candidate.support));
    EXPECT_EQ(rows[i]["code"], code(candidate.support.reason));
    EXPECT_EQ(rows[i][candidate.support ? "runs" : "reason"], candidate.support.text);
    EXPECT_EQ(rows[i][candidate.support ? "reason" : "runs"], "");
    EXPECT_EQ(rows[i]["chosen"], candidate.chosen);
  }
}

TEST(SelectionTest, CodesAndNamesAreDistinct) {
  std::set<std::string_view> codes;
  for (int i = 0; i <= static_cast<int>(Reason::kOperation); ++i) {
    codes.insert(code(static_cast<Reason>(i)));
  }
  EXPECT_EQ(codes.size(), static_cast<std::size_t>(Reason::kOperation) + 1);
  EXPECT_EQ(codes.count("unknown"), 0u);
  std::set<std::string_view> kinds;
  for (int i = 0; i <= static_cast<int>(WeightAndReduce::kDelegate); ++i) {
    kinds.insert(name(static_cast<WeightAndReduce>(i)));
  }
  EXPECT_EQ(kinds.size(), 2u);
}

TEST(SelectionTest, EveryVariantThatSaysYesRuns) {
  testing::Case spec;
  spec.num_tokens = 3;
  const testing::Problem problem = testing::make_problem(spec);
  MoeConfig config = testing::make_config(spec, DType::kBF16);
  config.routing_method = RoutingMethod::kCustom;
  std::vector<std::string> names;
  for (const testing::Variant& variant : testing::variants_for(config)) {
    SCOPED_TRACE(variant.name());
    names.push_back(variant.name());
    const Selection selection = select(variant.of(config), variant.experts->name());
    EXPECT_EQ(selection.prepare_finalize, variant.prepare_finalize);
    const ModularKernel kernel = selection.create(make_context());
    const auto packed = kernel.experts().pack(problem.weights);
    EXPECT_NO_THROW(testing::run_experts(problem, kernel, *packed));
  }
  EXPECT_EQ(names, (std::vector<std::string>{
                       "cpu", "cpu_unfused", "cpu_monolithic", "cpu_batch_invariant", "cpu_batched",
                       "cpu_batched_batch_invariant", "reference", "reference_unfused",
                       "reference_monolithic", "reference_batch_invariant", "reference_batched",
                       "reference_batched_batch_invariant"}));
}

}  // namespace fusedmoe::selection_test
