// Activation ranges against plain sums in double, and the scales that quantize makes of them.
#include "tools/calibrate.h"

#include <algorithm>
#include <cmath>

#include "fusedmoe/quant.h"
#include "gtest/gtest.h"
#include "reference/activation.h"
#include "tiny_checkpoint.h"

namespace fusedmoe::calibrate_test {

using testing::error_text;
using testing::TinyCheckpoints;

double weight(const WeightMatrix& matrix, std::int64_t out, std::int64_t in) {
  return load_f32(matrix.values.data(), matrix.values.dtype(),
                  out * matrix.values.stride(0) + in * matrix.values.stride(1));
}

double row_sum(const WeightMatrix& matrix, std::int64_t out, const Tensor& x, std::int64_t token) {
  double sum = 0;
  if (matrix.bias) {
    sum = load_f32(matrix.bias.data(), matrix.bias.dtype(), out * matrix.bias.stride(0));
  }
  for (std::int64_t h = 0; h < x.size(1); ++h) {
    sum += weight(matrix, out, h) * load_f32(x.data(), x.dtype(), token * x.size(1) + h);
  }
  return sum;
}

struct Ranges {
  LayerWeights layer;
  Tensor x;
  ActivationRange range;

  explicit Ranges(const std::string& family) {
    const auto path = TinyCheckpoints::instance().source(family);
    layer = Checkpoint::open(path).load_layer(0);
    x = SafetensorsFile::open(path / "input.safetensors").tensor("hidden_states");
    range = activation_range(layer, x);
  }
};

TEST(CalibrateTest, MatchesPlainSums) {
  const Ranges ranges("gpt_oss");  // with biases, interleaved, limited
  const ExpertWeights& experts = ranges.layer.experts;
  const std::int64_t tokens = ranges.x.size(0);
  const Tensor logits = Tensor::empty({tokens, 4}, DType::kF32);
  const Tensor ids = Tensor::empty({tokens, 2}, DType::kI32);
  const Tensor weights = Tensor::empty({tokens, 2}, DType::kF32);
  router_logits(ranges.layer.router_weights, ranges.x, logits);
  route(ranges.layer.router, logits, {}, {ids, weights});
  std::vector<double> expected(4);
  const ResolvedActivation activation = resolve(experts.activation, experts.activation_params);
  for (std::int64_t slot = 0; slot < ids.numel(); ++slot) {
    const auto e = static_cast<std::size_t>(ids.as<const std::int32_t>()[slot]);
    for (std::int64_t i = 0; i < experts.intermediate; ++i) {
      const double value =
          reference::activate(activation, row_sum(experts.experts[e].gate, i, ranges.x, slot / 2),
                              row_sum(experts.experts[e].up, i, ranges.x, slot / 2));
      expected[e] = std::max(expected[e], std::abs(value));
    }
  }
  ASSERT_EQ(ranges.range.intermediate.size(), 4U);
  for (std::size_t e = 0; e < 4; ++e) {
    // fp32 sums of 160 terms: about 160 half ulps at worst.
    EXPECT_NEAR(ranges.range.intermediate[e], expected[e], 1e-5 * expected[e]) << e;
  }
}

// Llama 4 multiplies the hidden states by the router weight, which is below 1.
TEST(CalibrateTest, RouterWeightOnInput) {
  const Ranges ranges("llama4");
  float largest = 0;
  for (std::int64_t i = 0; i < ranges.x.numel(); ++i) {
    largest = std::max(largest, std::abs(load_f32(ranges.x.data(), ranges.x.dtype(), i)));
  }
  EXPECT_LT(ranges.range.hidden, largest);
  EXPECT_GT(ranges.range.hidden, 0);
}

TEST(CalibrateTest, ScalesOfACheckpoint) {
  const Ranges ranges("qwen3_moe");
  const float largest =
      *std::max_element(ranges.range.intermediate.begin(), ranges.range.intermediate.end());
  for (const auto& [scheme, divisor] :
       {std::pair{"fp8_tensor_static", 448.0F}, {"nvfp4", 2688.0F}}) {
    const Checkpoint checkpoint = Checkpoint::open(
        TinyCheckpoints::instance().quantized("qwen3_moe", scheme, CheckpointLayout::kModelOpt));
    const LayerWeights layer = checkpoint.load_layer(0);
    for (std::size_t e = 0; e < 4; ++e) {
      const ExpertMatrices& expert = layer.experts.experts[e];
      const float own = ranges.range.intermediate[e];
      EXPECT_EQ(*expert.gate.input_scale.as<const float>(), ranges.range.hidden / divisor);
      EXPECT_EQ(*expert.up.input_scale.as<const float>(), ranges.range.hidden / divisor);
      EXPECT_EQ(*expert.down.input_scale.as<const float>(), (own > 0 ? own : largest) / divisor);
    }
  }
}

TEST(CalibrateTest, Refusals) {
  const Ranges ranges("qwen3_moe");
  EXPECT_NE(error_text([&] {
              activation_range(ranges.layer, Tensor::zeros({3, 7}, DType::kF32));
            }).find("hidden_states: was f32 [3, 7]"),
            std::string::npos);
  const Tensor bad = Tensor::zeros({1, 160}, DType::kF32);
  bad.as<float>()[5] = NAN;
  EXPECT_NE(error_text([&] { activation_range(ranges.layer, bad); }).find("NaN or infinite"),
            std::string::npos);
}

}  // namespace fusedmoe::calibrate_test
