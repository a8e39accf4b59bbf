// The golden layers (tests/data/README.md) through the GPU, router included: the same experts
// chosen, and an output as close to transformers' as that of the CPU.
#include "../unit/golden.h"

#include <algorithm>
#include <string>

#include "../unit/layer_problem.h"
#include "cuda_test.h"

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

/// The experts of the GPU, by what follows sm90_bf16 or sm90_mxfp4, and those of the CPU that round
/// at the same points, by what follows cpu.
struct Pair {
  std::string gpu, cpu;
};
const Pair kPairs[] = {
    {"", ""},
    {"_batch_invariant", ""},
    {"_batched", "_batched"},
    {"_unfused", "_unfused"},
    {"_monolithic", "_monolithic"},
};

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
  const std::string& name = GetParam();
  const std::string experts = name.find("mxfp4") == std::string::npos ? "sm90_bf16" : "sm90_mxfp4";
  const SafetensorsFile file = SafetensorsFile::open(testing::golden_path(name));
  for (const Pair& pair : kPairs) {
    // Llama 4 weights the input, which monolithic experts refuse.
    if (name == "llama4" && pair.gpu == "_monolithic") continue;
    SCOPED_TRACE(experts + pair.gpu);
    LayerOptions options = testing::layer_options(DType::kBF16, experts + pair.gpu);
    options.device = kGpu;
    const MoeLayer layer = testing::make_golden_layer(name, options);
    EXPECT_EQ(layer.selection().experts->name(), options.require);
    const MoeLayer cpu_layer =
        testing::make_golden_layer(name, testing::layer_options(DType::kBF16, "cpu" + pair.cpu));
    const double cpu = largest_error(cpu_layer, file), gpu = largest_error(layer, file);
    EXPECT_LE(gpu, 2 * cpu);
    RecordProperty("max_norm_of_sm90" + pair.gpu, std::to_string(gpu));
    RecordProperty("max_norm_of_cpu_for" + pair.gpu, std::to_string(cpu));
  }
}

}  // namespace
}  // namespace fusedmoe
