// Weights of every scheme as views into stacked tensors of odd sizes: shapes, scale grids, halves
// that begin inside a block, scalars; and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include "error_text.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"
#include "quant/weight_layout.h"

namespace fusedmoe::stacked_weights_test {

using Stacked = ExpertWeights::Stacked;

constexpr std::int64_t kExperts = 2, kHidden = 360, kInner = 90;

// Positive finite numbers in every format, different from element to element.
Tensor filled(const Shape& shape, DType dtype) {
  Tensor tensor = Tensor::empty(shape, dtype);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    if (bits(dtype) == 8) {
      tensor.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(1 + i % 100);
    } else if (dtype == DType::kI32) {
      tensor.as<std::int32_t>()[i] = static_cast<std::int32_t>(i);
    } else {
      store_f32(tensor.data(), dtype, i, static_cast<float>(1 + i));
    }
  }
  return tensor;
}

Stacked stack_of(const QuantScheme& scheme, bool gated = true) {
  const QuantKey& key = scheme.weights;
  const core::WeightLayout layout = core::weight_layout(key, "scheme");
  const std::int64_t rows = gated ? 2 * kInner : kInner;
  const auto values = [&](std::int64_t out, std::int64_t in) {
    const Shape shape = layout.values_shape(out, in);
    return filled({kExperts, shape[0], shape[1]}, layout.values_dtypes.front());
  };
  const auto grid = [&](std::int64_t out, std::int64_t in, DType dtype) {
    return filled(
        {kExperts, core::num_blocks(out, key.group.rows), core::num_blocks(in, key.group.cols)},
        dtype);
  };
  Stacked s;
  s.w13 = values(rows, kHidden);
  s.w2 = values(kHidden, kInner);
  s.w13_bias = filled({kExperts, rows}, DType::kBF16);
  s.w2_bias = filled({kExperts, kHidden}, DType::kBF16);
  if (layout.quantized()) {
    s.w13_scales = grid(rows, kHidden, layout.scales_dtypes.front());
    s.w2_scales = grid(kHidden, kInner, layout.scales_dtypes.front());
  }
  if (layout.zero_points) {
    s.w13_zero_points = grid(rows, kHidden, DType::kU8);
    s.w2_zero_points = grid(kHidden, kInner, DType::kU8);
  }
  if (layout.global_scale == core::GlobalScale::kPerMatrix) {
    s.w13_global_scales = filled({kExperts}, DType::kF32);
    s.w2_global_scales = filled({kExperts}, DType::kF32);
  } else if (layout.global_scale == core::GlobalScale::kPerRow) {
    s.w13_global_scales = filled({kExperts, rows}, DType::kF32);
    s.w2_global_scales = filled({kExperts, kHidden}, DType::kF32);
  } else if (layout.global_scale == core::GlobalScale::kPerBlock) {
    const Shape w13 = layout.global_shape(rows, kHidden), w2 = layout.global_shape(kHidden, kInner);
    s.w13_global_scales = filled({kExperts, w13[0], w13[1]}, DType::kF16);
    s.w2_global_scales = filled({kExperts, w2[0], w2[1]}, DType::kF16);
  }
  if (scheme.activations && (!scheme.activations->dynamic || scheme.activations->global_scale)) {
    s.w13_input_scales = filled({kExperts}, DType::kF32);
    s.w2_input_scales = filled({1}, DType::kF32);
  }
  return s;
}

class EverySchemeTest : public ::testing::TestWithParam<NamedScheme> {};

TEST_P(EverySchemeTest, IsLoadedFromStacks) {
  const QuantScheme& scheme = GetParam().scheme;
  const Stacked stacked = stack_of(scheme);
  const ExpertWeights weights = ExpertWeights::from_stacked(stacked, scheme, Activation::kSilu);
  EXPECT_EQ(weights.hidden, kHidden);
  EXPECT_EQ(weights.intermediate, kInner);
  EXPECT_TRUE(weights.has_bias());
  const core::WeightLayout layout = core::weight_layout(scheme.weights, "scheme");
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const ExpertMatrices& expert = weights.experts[e];
    EXPECT_EQ(expert.gate.values.shape(), layout.values_shape(kInner, kHidden));
    EXPECT_EQ(expert.up.values.data(),
              stacked.w13.select(0, e).slice(0, kInner, kInner + 1).data());
    EXPECT_EQ(expert.down.values.data(), stacked.w2.select(0, e).data());
    if (layout.global_scale == core::GlobalScale::kPerRow) {
      EXPECT_EQ(expert.up.global_scale.as<float>()[0], 1 + e * 2 * kInner + kInner);
    }
    if (weights.scheme.activations && !weights.scheme.activations->dynamic) {
      EXPECT_EQ(*expert.gate.input_scale.as<float>(), 1 + e);
      EXPECT_EQ(*expert.up.input_scale.as<float>(), 1 + e);
      EXPECT_EQ(*expert.down.input_scale.as<float>(), 1);
    }
  }
}

TEST_P(EverySchemeTest, IsLoadedFromStacksWithoutUp) {
  const QuantScheme& scheme = GetParam().scheme;
  const ExpertWeights weights =
      ExpertWeights::from_stacked(stack_of(scheme, false), scheme, Activation::kRelu2NoMul);
  EXPECT_EQ(weights.intermediate, kInner);
  EXPECT_FALSE(weights.experts[1].up.scales);
}

TEST_P(EverySchemeTest, EachPartIsRequiredOrRefused) {
  const QuantScheme& scheme = GetParam().scheme;
  const Stacked whole = stack_of(scheme);
  for (Tensor Stacked::*part :
       {&Stacked::w13, &Stacked::w2, &Stacked::w13_scales, &Stacked::w2_scales,
        &Stacked::w13_zero_points, &Stacked::w2_zero_points, &Stacked::w13_global_scales,
        &Stacked::w2_global_scales, &Stacked::w13_input_scales, &Stacked::w2_input_scales}) {
    Stacked changed = whole;
    const bool input = part == &Stacked::w13_input_scales || part == &Stacked::w2_input_scales;
    changed.*part = whole.*part ? Tensor() : filled({kExperts}, DType::kF32);
    const std::string error = testing::error_text(
        [&] { ExpertWeights::from_stacked(changed, scheme, Activation::kSilu); });
    // Input scales that a dynamic scheme does not use are ignored.
    EXPECT_EQ(error == "no error", input && !(whole.*part)) << error;
  }
}

INSTANTIATE_TEST_SUITE_P(All, EverySchemeTest, ::testing::ValuesIn(named_schemes()),
                         [](const auto& info) { return info.param.name; });

QuantScheme scheme_of(const char* text) {
  return parse_scheme(text);
}

float scale_at(const WeightMatrix& m, const QuantKey& key, std::int64_t row, std::int64_t column) {
  const std::int64_t r = core::block_of(row, key.group.rows, m.first_row);
  const std::int64_t c = core::block_of(column, key.group.cols, m.first_col);
  return load_f32(m.scales.data(), m.scales.dtype(),
                  r * m.scales.stride(0) + c * m.scales.stride(1));
}

TEST(StackedWeightsTest, BlocksThatStraddleGateAndUp) {
  const QuantScheme scheme = scheme_of("fp8_block");
  for (const auto layout : {GateUpLayout::kGateUp, GateUpLayout::kUpGate}) {
    Stacked stacked = stack_of(scheme);
    stacked.gate_up_layout = layout;
    const ExpertWeights weights = ExpertWeights::from_stacked(stacked, scheme, Activation::kSilu);
    const ExpertMatrices& expert = weights.experts[1];
    const bool gate_first = layout == GateUpLayout::kGateUp;
    const WeightMatrix& first = gate_first ? expert.gate : expert.up;
    const WeightMatrix& second = gate_first ? expert.up : expert.gate;
    EXPECT_EQ(first.first_row, 0);
    EXPECT_EQ(second.first_row, kInner);
    EXPECT_EQ(first.scales.shape(), (Shape{1, 3}));
    EXPECT_EQ(second.scales.shape(), (Shape{2, 3}));
    // Fused scales of expert 1 count from 7; rows 0 .. 127 of the fused matrix have those of the
    // first row of blocks.
    const QuantKey& key = scheme.weights;
    EXPECT_EQ(scale_at(first, key, 89, 359), 9);
    EXPECT_EQ(scale_at(second, key, 37, 0), 7);
    EXPECT_EQ(scale_at(second, key, 38, 0), 10);
    EXPECT_EQ(scale_at(second, key, 89, 128), 11);
  }
}

TEST(StackedWeightsTest, BlocksOfInterleavedRowsAreRefused) {
  Stacked stacked = stack_of(scheme_of("fp8_block"));
  stacked.gate_up_layout = GateUpLayout::kInterleaved;
  EXPECT_NE(testing::error_text([&] {
              ExpertWeights::from_stacked(stacked, scheme_of("fp8_block"), Activation::kSilu);
            }).find("gate_up_layout: was interleaved"),
            std::string::npos);
}

TEST(StackedWeightsTest, InterleavedRowsTakeTheirScales) {
  Stacked stacked = stack_of(scheme_of("int4_g32_zp"));
  stacked.gate_up_layout = GateUpLayout::kInterleaved;
  const ExpertWeights weights =
      ExpertWeights::from_stacked(stacked, scheme_of("int4_g32_zp"), Activation::kSilu);
  const WeightMatrix& up = weights.experts[0].up;
  EXPECT_EQ(scale_at(up, weights.scheme.weights, 3, 32), 1 + 7 * 12 + 1);
  EXPECT_EQ(up.zero_points.as<std::uint8_t>()[3 * up.zero_points.stride(0)], 1 + 84);
}

TEST(StackedWeightsTest, ScalarsPerExpertOrPerHalf) {
  const QuantScheme scheme = scheme_of("fp8_tensor_static");
  Stacked stacked = stack_of(scheme);
  stacked.w13_scales = filled({kExperts, 2}, DType::kF32);
  stacked.w2_scales = filled({kExperts, 1}, DType::kF32);
  stacked.w13_input_scales = filled({kExperts, 2}, DType::kF32);
  stacked.gate_up_layout = GateUpLayout::kUpGate;
  const ExpertWeights weights = ExpertWeights::from_stacked(stacked, scheme, Activation::kSilu);
  const ExpertMatrices& expert = weights.experts[1];
  EXPECT_EQ(*expert.gate.scales.as<float>(), 3);
  EXPECT_EQ(*expert.up.scales.as<float>(), 4);
  EXPECT_EQ(*expert.down.scales.as<float>(), 2);
  EXPECT_EQ(*expert.gate.input_scale.as<float>(), 3);
  EXPECT_EQ(*expert.up.input_scale.as<float>(), 4);
  stacked.w13_scales = filled({kExperts, 1, 1}, DType::kF32);
  EXPECT_EQ(
      testing::error_text([&] { ExpertWeights::from_stacked(stacked, scheme, Activation::kSilu); }),
      "no error");
  stacked.w13_scales = filled({kExperts, 3}, DType::kF32);
  EXPECT_NE(testing::error_text([&] {
              ExpertWeights::from_stacked(stacked, scheme, Activation::kSilu);
            }).find("w13_scales: was f32 [2, 3]"),
            std::string::npos);
}

TEST(StackedWeightsTest, ViewsOfTooManyExpertsAreRefused) {
  const QuantScheme scheme = scheme_of("bf16");
  Stacked stacked = stack_of(scheme);
  for (Tensor Stacked::*part : {&Stacked::w13, &Stacked::w2}) {
    Tensor& one = stacked.*part;
    const Shape many{std::int64_t{1} << 40, one.size(1), one.size(2)};
    one = Tensor(TensorView(one.data(), one.dtype(), many, {0, one.size(2), 1}, {}), one.owner());
  }
  EXPECT_NE(testing::error_text([&] {
              ExpertWeights::from_stacked(stacked, scheme, Activation::kSilu);
            }).find("must be of at most 1048576 experts"),
            std::string::npos);
}

struct Spoiled {
  std::string name;
  std::string scheme;
  std::function<void(WeightMatrix&)> spoil;  // of experts[1].down
  std::string fault;
};

class SpoiledMatrixTest : public ::testing::TestWithParam<Spoiled> {};

TEST_P(SpoiledMatrixTest, IsNamed) {
  const QuantScheme scheme = scheme_of(GetParam().scheme.c_str());
  ExpertWeights weights = ExpertWeights::from_stacked(stack_of(scheme), scheme, Activation::kSilu);
  GetParam().spoil(weights.experts[1].down);
  const std::string text = testing::error_text([&] { weights.validate(); });
  EXPECT_NE(text.find("weights.experts[1].down." + GetParam().fault), std::string::npos) << text;
}

constexpr float kZero = 0;

using W = WeightMatrix;

INSTANTIATE_TEST_SUITE_P(
    All, SpoiledMatrixTest,
    ::testing::Values(
        Spoiled{"e4m3_scale_nan", "nvfp4", [](W& m) { m.scales.as<std::uint8_t>()[8] = 0x7f; },
                "scales: was nan at row 1, block 2; must be finite"},
        Spoiled{"f32_scale_infinite", "fp8_channel_token",
                [](W& m) { m.scales.as<float>()[5] = INFINITY; },
                "scales: was inf at row 5, block 0"},
        Spoiled{"integer_scales", "fp8_block",
                [](W& m) { m.scales = TensorView(m.scales.data(), DType::kI32, m.scales.shape()); },
                "scales: was i32 [3, 1]; must be f32, f16 or bf16"},
        Spoiled{"zero_points_of_words", "int4_g32_zp",
                [](W& m) {
                  m.zero_points = TensorView(m.values.data(), DType::kI32, m.zero_points.shape());
                },
                "zero_points: was i32"},
        Spoiled{"zero_points_of_a_symmetric_scheme", "int4_g32",
                [](W& m) { m.zero_points = m.scales; }, "zero_points: was f32"},
        Spoiled{"global_scale_missing", "nvfp4", [](W& m) { m.global_scale = {}; },
                "global_scale: was undefined"},
        Spoiled{"global_scale_nan", "w4a8",
                [](W& m) { m.global_scale.as<float>()[7] = std::nanf(""); },
                "global_scale: was nan at 7"},
        Spoiled{"input_scale_missing", "fp8_tensor_static", [](W& m) { m.input_scale = {}; },
                "input_scale: was undefined"},
        Spoiled{"input_scale_zero", "nvfp4",
                [](W& m) { m.input_scale = TensorView(&kZero, DType::kF32, {1}); },
                "input_scale: was 0; must be finite and positive"},
        Spoiled{"first_row_beyond_the_block", "fp8_block", [](W& m) { m.first_row = 128; },
                "first_row: was 128; must be in [0, 128)"},
        Spoiled{"first_column_without_its_block", "fp8_block", [](W& m) { m.first_col = 100; },
                "scales: was f32 [3, 1]; must be of shape [3, 2]"},
        Spoiled{"first_row_of_rows", "fp8_channel_token", [](W& m) { m.first_row = 1; },
                "first_row: was 1; must be in [0, 1)"},
        Spoiled{"i4_bytes", "int4_g32",
                [](W& m) { m.values = TensorView(m.values.data(), DType::kU8, m.values.shape()); },
                "values: was u8 [360, 12]; must be i32"}),
    [](const auto& info) { return info.param.name; });

}  // namespace fusedmoe::stacked_weights_test
