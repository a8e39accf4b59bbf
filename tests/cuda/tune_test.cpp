// Tuned and pinned tile plans on the GPU: what the file says runs, and every plan fits in the
// workspace that was sized without it.
#include "moe/tuned_configs.h"
#include "fusedmoe/quant.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "cuda_test.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "testing/cases.h"

namespace fusedmoe {
namespace {

using testing::kGpu;
using testing::to_gpu;
using testing::to_host;

testing::Case spec_of(std::int64_t num_tokens) {
  testing::Case spec;
  spec.num_tokens = num_tokens;
  spec.num_experts = 8;
  spec.topk = 2;
  spec.hidden = 512;
  spec.intermediate = 320;
  spec.scheme = schemes::mxfp4_w4a16();
  return spec;
}

class TuneTest : public testing::CudaTest {
 protected:
  /// A file for every test of the process: it is read once.
  static void SetUpTestSuite() {
    if (!device_problem(kGpu).empty()) return;
    TunedPlans plans;
    for (const char* experts : {"sm90_mxfp4", "sm90_mxfp4_batch_invariant"}) {
      TunedPlan plan;
      plan.device = device_name(kGpu);
      plan.experts = experts;
      plan.hidden = 512;
      plan.intermediate = 320;
      plan.num_local_experts = 8;
      plan.topk = 2;
      plan.num_tokens = 64;
      plan.plan = all_plans(experts, 64).back();
      plans.set(plan);
    }
    const auto path = std::filesystem::path(::testing::TempDir()) /
                      ("cuda_tune_test_" + std::to_string(::getpid()) + ".json");
    plans.save(path);
    ::setenv("FUSEDMOE_TUNED_PLANS", path.c_str(), 1);
    EXPECT_EQ(tuned_plans().plans().size(), 2u);
    std::filesystem::remove(path);
  }

  static std::shared_ptr<const Experts> find(std::string_view name) {
    for (const auto& experts : all_experts()) {
      if (experts->name() == name) return experts;
    }
    return nullptr;
  }
  static ProblemSize size_of(std::int64_t num_tokens) {
    return ProblemSize::of(testing::make_config(spec_of(num_tokens), DType::kBF16, kGpu),
                           num_tokens);
  }
  /// First the one that is chosen without tuned plans, which the pin keeps from being read.
  static std::vector<std::string> all_plans(std::string_view experts, std::int64_t num_tokens) {
    const PinnedTilePlan untuned("");
    return find(experts)->tile_plans(size_of(num_tokens), kGpu);
  }
};

TEST_F(TuneTest, TheFileSaysWhatRuns) {
  const auto now = [](std::string_view experts, std::int64_t num_tokens) {
    return find(experts)->tile_plans(size_of(num_tokens), kGpu).front();
  };
  const auto untuned = [](std::string_view experts, std::int64_t num_tokens) {
    return all_plans(experts, num_tokens).front();
  };
  ASSERT_NE(untuned("sm90_mxfp4", 64), all_plans("sm90_mxfp4", 64).back());
  EXPECT_EQ(now("sm90_mxfp4", 64), all_plans("sm90_mxfp4", 64).back());
  EXPECT_EQ(now("sm90_mxfp4", 100), all_plans("sm90_mxfp4", 64).back());
  EXPECT_EQ(now("sm90_mxfp4", 200), untuned("sm90_mxfp4", 200));
  EXPECT_EQ(now("sm90_mxfp4_unfused", 64), untuned("sm90_mxfp4_unfused", 64));
  EXPECT_EQ(now("sm90_mxfp4_batch_invariant", 64), untuned("sm90_mxfp4_batch_invariant", 64))
      << "a plan for one number of tokens";
}

TEST_F(TuneTest, EveryPlanRunsInTheWorkspaceOfFewerAndOfMoreTokens) {
  const auto experts = find("sm90_mxfp4");
  const ModularKernel kernel(make_no_ep(), experts);
  const testing::Problem problem = testing::make_problem(spec_of(200));
  const auto packed = experts->pack(problem.weights);
  const Tensor rounded = Tensor::empty(problem.hidden_states.shape(), DType::kBF16);
  convert(problem.hidden_states, rounded);
  const Tensor states = to_gpu(rounded), ids = to_gpu(problem.topk_ids),
               weights = to_gpu(problem.topk_weights);
  for (const std::int64_t num_tokens : {1, 64, 200}) {
    const Tensor output = Tensor::empty({num_tokens, 512}, DType::kBF16, kGpu);
    Tensor first;
    for (const std::string& plan : all_plans("sm90_mxfp4", num_tokens)) {
      SCOPED_TRACE(plan);
      const auto bytes = kernel.workspace_bytes(size_of(num_tokens));
      const PinnedTilePlan pinned(plan);
      ASSERT_EQ(kernel.workspace_bytes(size_of(num_tokens)), bytes);
      // A margin behind the workspace shows what does not stay in it.
      constexpr std::int64_t kMargin = 4096;
      const auto size = static_cast<std::int64_t>(bytes);
      const Tensor workspace = Tensor::empty({size + kMargin}, DType::kU8, kGpu);
      fill_bytes(workspace, 0xa5, Stream{kGpu});
      KernelArgs args;
      args.weights = packed.get();
      args.output = output;
      args.hidden_states = states.slice(0, 0, num_tokens);
      args.topk_ids = ids.slice(0, 0, num_tokens);
      args.topk_weights = weights.slice(0, 0, num_tokens);
      args.num_experts = 8;
      args.stream = Stream{kGpu};
      kernel.apply(args, {workspace.data(), bytes});
      synchronize(args.stream);
      const Tensor actual = to_host(output);
      if (!first) first = actual;
      EXPECT_LE(testing::compare(actual, first).max_norm_relative, 1e-2);
      const Tensor margin =
          to_host(Tensor(workspace.slice(0, size, size + kMargin), workspace.owner()));
      EXPECT_EQ(std::count(margin.as<std::uint8_t>(), margin.as<std::uint8_t>() + kMargin, 0xa5),
                kMargin);
    }
  }
}

}  // namespace
}  // namespace fusedmoe
