// The golden layers (tests/data/README.md) through the GPU, router included: the same experts
// chosen, and an output as close to transformers' as that of the CPU.
#include "../unit/golden.h"

#include <algorithm>
#include <string>

#include "../unit/layer_problem.h"
#include "cuda_test.h"
#include "experts_problem.h"

namespace fusedmoe {
namespace {

using testing::compare;
using testing::Difference;
using testing::Golden;
using testing::kGpu;
using testing::LayerResult;

// Largest error of an output in bf16, relative to the largest value, that the project allows.
constexpr double kMaxNorm = 1e-2;
// The GPU adds the same bf16 products in fp32, in another order: roundings of 6e-8 of the partial
// sums, over at most 360 products. Weights follow logits with a slope below 1 (at most 2.5 / 4).
constexpr double kLogits = 1e-5, kTopkWeights = 1e-5;

/// What is asked of both, which then round at the same points.
struct Wish {
  const char* title;
  const char* prepare_finalize;
  bool LayerOptions::*option;  // null: none
};
constexpr Wish kWishes[] = {
    {"plain", "no_ep", nullptr},
    {"batch_invariant", "no_ep", &LayerOptions::batch_invariant},
    {"batched", "batched", nullptr},
    {"hooks", "no_ep", &LayerOptions::hooks},
    {"monolithic", "no_ep", &LayerOptions::monolithic},
};

MoeLayer make_layer(const std::string& golden, const std::string& experts, Device device,
                    const Wish& wish) {
  LayerOptions options;
  options.require = experts + "+" + wish.prepare_finalize;
  options.device = device;
  if (wish.option) options.*wish.option = true;
  return testing::make_golden_layer(golden, options);
}

class CudaGolden : public testing::CudaTestWith<std::string> {};
INSTANTIATE_TEST_SUITE_P(Transformers, CudaGolden, ::testing::ValuesIn(testing::golden_names()),
                         [](const auto& info) { return info.param; });

/// Largest error over all numbers of tokens: of 1 token alone it may be small by chance.
double largest_error(const MoeLayer& layer, const SafetensorsFile& file) {
  double largest = 0;
  for (const std::int64_t num_tokens : testing::kGoldenTokens) {
    SCOPED_TRACE("T=" + std::to_string(num_tokens));
    const Golden golden(file, num_tokens);
    const LayerResult result = testing::forward_golden(layer, golden.hidden_states, DType::kBF16);
    const Difference output = compare(result.output, golden.output);
    EXPECT_FALSE(output.nonfinite_mismatch) << output.to_string();
    EXPECT_LE(output.max_norm_relative, kMaxNorm) << output.to_string();
    const Difference logits = compare(result.router_logits, golden.router_logits);
    EXPECT_LE(logits.max_norm_relative, kLogits) << logits.to_string();
    testing::expect_same_routing(result, golden, kTopkWeights);
    largest = std::max(largest, output.max_norm_relative);
  }
  return largest;
}

TEST_P(CudaGolden, AsCloseAsTheCpu) {
  FUSEDMOE_SKIP_WITHOUT_KERNELS("bf16", DType::kBF16);
  const std::string& name = GetParam();
  const std::string experts(testing::gpu_family().name());
  const SafetensorsFile file = SafetensorsFile::open(testing::golden_path(name));
  for (const Wish& wish : kWishes) {
    // Llama 4 weights the input, which monolithic experts refuse.
    if (name == "llama4" && wish.option == &LayerOptions::monolithic) continue;
    SCOPED_TRACE(wish.title);
    const double cpu = largest_error(make_layer(name, "cpu", {}, wish), file);
    const double gpu = largest_error(make_layer(name, experts, kGpu, wish), file);
    EXPECT_LE(gpu, 2 * cpu);
    RecordProperty(std::string("max_norm_of_gpu_") + wish.title, std::to_string(gpu));
    RecordProperty(std::string("max_norm_of_cpu_") + wish.title, std::to_string(cpu));
  }
}

}  // namespace
}  // namespace fusedmoe
