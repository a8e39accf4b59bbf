// Tuned and requested kernel configurations on the GPU: what was tuned runs, and every
// configuration fits in the workspace that was sized without it.
#include "moe/tuned_configs.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_test.h"
#include "experts_problem.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe {
namespace {

using testing::gpu_variant;
using testing::kGpu;

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

/// Those for a number of tokens, the one that runs first.
std::vector<std::string> configs_of(std::string_view suffix, const TunedConfigs* tuned,
                                    std::int64_t num_tokens) {
  const testing::Variant variant = gpu_variant(suffix);
  const MoeConfig config =
      variant.of(testing::make_config(spec_of(num_tokens), DType::kBF16, kGpu));
  const auto experts = variant.experts->create(config, {.tuned = tuned});
  return experts->kernel_configs(ProblemSize::of(config, num_tokens));
}

class TuneTest : public testing::CudaTest {
 protected:
  void SetUp() override {
    testing::CudaTest::SetUp();
    if (IsSkipped()) return;
    FUSEDMOE_SKIP_WITHOUT_KERNELS("mxfp4_w4a16", DType::kBF16);
  }
};

TEST_F(TuneTest, WhatWasTunedRuns) {
  TunedConfig fastest;
  fastest.device = device_name(kGpu);
  fastest.experts = testing::gpu_family().name();
  fastest.scheme = name(schemes::mxfp4_w4a16());
  fastest.hidden = 512;
  fastest.intermediate = 320;
  fastest.num_local_experts = 8;
  fastest.topk = 2;
  fastest.num_tokens = 64;
  fastest.config = configs_of("", nullptr, 64).back();
  TunedConfigs tuned;
  tuned.set(fastest);

  ASSERT_NE(configs_of("", nullptr, 64).front(), fastest.config);
  EXPECT_EQ(configs_of("", &tuned, 64).front(), fastest.config);
  EXPECT_EQ(configs_of("", &tuned, 100).front(), fastest.config) << "the nearest number of tokens";
  EXPECT_EQ(configs_of("", &tuned, 200), configs_of("", nullptr, 200));
  EXPECT_EQ(configs_of("_batch_invariant", &tuned, 64), configs_of("_batch_invariant", nullptr, 64))
      << "tuned for one number of tokens";

  TunedConfigs of_another_scheme;
  fastest.scheme = "bf16";
  of_another_scheme.set(fastest);
  EXPECT_EQ(configs_of("", &of_another_scheme, 64), configs_of("", nullptr, 64));
}

TEST_F(TuneTest, EveryConfigurationRunsInTheWorkspaceOfTheProblem) {
  const ModularKernel kernel = testing::make_kernel(spec_of(200));
  const auto packed = kernel.experts().pack(testing::make_problem(spec_of(200)).weights);
  for (const std::int64_t num_tokens : {1, 64, 200}) {
    // Guard bytes behind the workspace show what does not stay in it.
    const testing::KernelRun run(testing::make_problem(spec_of(num_tokens)), kernel, packed);
    const Tensor first = run.run();
    for (const std::string& config : configs_of("", nullptr, num_tokens)) {
      SCOPED_TRACE(config);
      const int number = kernel.experts().find_kernel_config(config);
      ASSERT_GE(number, 0);
      run.poison(0xa5);
      EXPECT_LE(testing::compare(run.run({.kernel_config = number}), first).max_norm_relative,
                1e-2);
    }
  }
}

}  // namespace
}  // namespace fusedmoe
