// Block-scaled operands are exact in bf16, so GEMM 1 of quantized hidden states and weights is the
// double-precision sum of the decoded operands up to fp32 summation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "fusedmoe/quant.h"
#include "testing/cases.h"

namespace fusedmoe::exact_products_test {

using testing::Case;
using testing::Problem;

/// Row `row` of hidden states, quantized and decoded to double.
std::vector<double> decoded_row(const Problem& problem, std::int64_t row, float global_scale) {
  const QuantKey& key = *problem.spec.scheme.activations;
  const std::int64_t hidden = problem.spec.hidden;
  const QuantizedShape shape = quantized_shape(key, 1, hidden);
  const Tensor codes = Tensor::zeros(shape.values, shape.values_dtype);
  const Tensor scales = Tensor::zeros(shape.scales, shape.scales_dtype);
  std::optional<float> scale;
  if (key.global_scale) scale = global_scale;
  quantize(problem.hidden_states.slice(0, row, row + 1), key, codes, scales, scale);
  std::vector<double> result;
  for (std::int64_t i = 0; i < hidden; ++i) {
    const double value = key.value == DType::kE2M1 ? load_f32(codes.data(), DType::kE2M1, i)
                                                   : load_f32(codes.data(), key.value, i);
    const double block = load_f32(scales.data(), *key.scale, i / key.group.cols);
    result.push_back(value * block * (key.global_scale ? global_scale : 1.0));
  }
  return result;
}

float input_scale(const ExpertMatrices& expert) {
  if (!expert.gate.input_scale) return 1;
  return std::max(*expert.gate.input_scale.as<const float>(),
                  *expert.up.input_scale.as<const float>());
}

class ExactProductsTest : public ::testing::TestWithParam<const char*> {};

TEST_P(ExactProductsTest, Gemm1IsTheSumInDouble) {
  Case spec;
  spec.num_tokens = 5;
  spec.num_experts = 2;
  spec.topk = 1;
  spec.hidden = 2880;
  spec.intermediate = 64;
  spec.scheme = parse_scheme(GetParam());
  const Problem problem = testing::make_problem(spec);
  double worst = 0, largest = 0;
  ExpertsHooks hooks;
  hooks.after_gemm1 = [&](const HookArgs& args) {
    for (std::int64_t e = 0; e < spec.num_experts; ++e) {
      const ExpertMatrices& expert = problem.weights.experts[static_cast<std::size_t>(e)];
      const Tensor gate = dequantize_weights(expert.gate, spec.scheme.weights, spec.hidden);
      const Tensor up = dequantize_weights(expert.up, spec.scheme.weights, spec.hidden);
      const auto* offsets = args.expert_offsets.as<const std::int32_t>();
      for (std::int64_t row = offsets[e]; row < offsets[e + 1]; ++row) {
        const std::int64_t token = args.permuted_to_slot.as<const std::int32_t>()[row];
        const std::vector<double> x = decoded_row(problem, token, input_scale(expert));
        for (std::int64_t column = 0; column < 2 * spec.intermediate; ++column) {
          const float* weights = (column < spec.intermediate ? gate : up).as<const float>() +
                                 column % spec.intermediate * spec.hidden;
          double sum = 0;
          for (std::int64_t k = 0; k < spec.hidden; ++k) sum += x[k] * weights[k];
          const double actual = args.output.as<const float>()[row * 2 * spec.intermediate + column];
          worst = std::max(worst, std::abs(actual - sum));
          largest = std::max(largest, std::abs(sum));
        }
      }
    }
  };
  testing::run_variant(problem, testing::find_variant("cpu_unfused"), DType::kF32, {},
                       {.hooks = &hooks});
  EXPECT_GT(largest, 0);
  EXPECT_LE(worst, 1e-6 * largest);
}

INSTANTIATE_TEST_SUITE_P(Schemes, ExactProductsTest,
                         ::testing::Values("mxfp4", "nvfp4", "mxfp4_mxfp8", "mxfp8"));

}  // namespace fusedmoe::exact_products_test
