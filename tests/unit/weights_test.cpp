// ExpertWeights: views into stacked tensors, and the checks.
#include "fusedmoe/weights.h"
#include "error_text.h"

#include <cstring>
#include <functional>
#include <limits>

#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "gtest/gtest.h"

namespace fusedmoe::weights_test {

constexpr std::int64_t kExperts = 3, kHidden = 64, kInner = 32;

// Every element is its own linear index, so that a view shows where it points.
Tensor counted(Shape shape) {
  Tensor tensor = Tensor::empty(shape, DType::kF32);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.as<float>()[i] = static_cast<float>(i);
  }
  return tensor;
}

Tensor codes(Shape shape, std::uint8_t value = 120) {
  Tensor tensor = Tensor::empty(shape, DType::kU8);
  std::fill_n(tensor.as<std::uint8_t>(), tensor.numel(), value);
  return tensor;
}

float at(const TensorView& view, std::int64_t row, std::int64_t col) {
  return view.as<float>()[row * view.stride(0) + col * view.stride(1)];
}

const QuantScheme kF32Scheme = schemes::unquantized(DType::kF32);

TEST(ExpertWeightsTest, StackedLayoutsAgree) {
  // Row r of the gate, up and down matrices of expert e in a (E, rows, cols) tensor.
  const Tensor w13 = counted({kExperts, 2 * kInner, kHidden});
  const Tensor w2 = counted({kExperts, kHidden, kInner});
  const auto index = [](std::int64_t e, std::int64_t row, std::int64_t col) {
    return static_cast<float>((e * 2 * kInner + row) * kHidden + col);
  };
  const auto load = [&](GateUpLayout layout) {
    return ExpertWeights::from_stacked({.w13 = w13,
                                        .w13_scales = {},
                                        .w13_bias = {},
                                        .w2 = w2,
                                        .w2_scales = {},
                                        .w2_bias = {},
                                        .gate_up_layout = layout},
                                       kF32Scheme, Activation::kSilu);
  };
  const ExpertWeights gate_up = load(GateUpLayout::kGateUp), up_gate = load(GateUpLayout::kUpGate),
                      interleaved = load(GateUpLayout::kInterleaved);
  EXPECT_EQ(gate_up.hidden, kHidden);
  EXPECT_EQ(gate_up.intermediate, kInner);
  EXPECT_EQ(gate_up.nbytes(), kExperts * 3 * kInner * kHidden * 4);
  EXPECT_FALSE(gate_up.has_bias());
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const auto i = static_cast<std::size_t>(e);
    EXPECT_EQ(at(gate_up.experts[i].gate.values, 5, 7), index(e, 5, 7));
    EXPECT_EQ(at(gate_up.experts[i].up.values, 5, 7), index(e, kInner + 5, 7));
    EXPECT_EQ(at(up_gate.experts[i].gate.values, 5, 7), index(e, kInner + 5, 7));
    EXPECT_EQ(at(up_gate.experts[i].up.values, 5, 7), index(e, 5, 7));
    EXPECT_EQ(at(interleaved.experts[i].gate.values, 5, 7), index(e, 10, 7));
    EXPECT_EQ(at(interleaved.experts[i].up.values, 5, 7), index(e, 11, 7));
    EXPECT_EQ(at(gate_up.experts[i].down.values, 9, 3),
              static_cast<float>((e * kHidden + 9) * kInner + 3));
  }
}

TEST(ExpertWeightsTest, TransposedStack) {
  ExpertWeights::Stacked stacked;
  stacked.w13 = counted({kExperts, kHidden, 2 * kInner});
  stacked.w2 = counted({kExperts, kInner, kHidden});
  stacked.transposed = true;
  const ExpertWeights weights = ExpertWeights::from_stacked(stacked, kF32Scheme, Activation::kSilu);
  EXPECT_EQ(at(weights.experts[1].up.values, 5, 7),
            static_cast<float>((kHidden + 7) * 2 * kInner + kInner + 5));
  EXPECT_EQ(at(weights.experts[1].down.values, 9, 3),
            static_cast<float>((kInner + 3) * kHidden + 9));
}

TEST(ExpertWeightsTest, NonGatedHasNoUp) {
  ExpertWeights::Stacked stacked;
  stacked.w13 = counted({kExperts, kInner, kHidden});
  stacked.w13_bias = counted({kExperts, kInner});
  stacked.w2 = counted({kExperts, kHidden, kInner});
  const ExpertWeights weights =
      ExpertWeights::from_stacked(stacked, kF32Scheme, Activation::kRelu2NoMul);
  EXPECT_EQ(weights.intermediate, kInner);
  EXPECT_TRUE(weights.has_bias());
  EXPECT_FALSE(weights.experts[2].up.values.defined());
  EXPECT_EQ(weights.experts[2].gate.bias.as<float>()[3], 2 * kInner + 3);
}

ExpertWeights::Stacked mxfp4_stack(bool rank_4) {
  ExpertWeights::Stacked stacked;
  stacked.w13 = rank_4 ? codes({kExperts, 2 * kInner, kHidden / 32, 16})
                       : codes({kExperts, 2 * kInner, kHidden / 2});
  stacked.w2 = codes({kExperts, kHidden, kInner / 32, 16});
  stacked.w13_scales = codes({kExperts, 2 * kInner, kHidden / 32});
  stacked.w2_scales = codes({kExperts, kHidden, kInner / 32});
  stacked.w13_bias = counted({kExperts, 2 * kInner});
  stacked.w2_bias = counted({kExperts, kHidden});
  stacked.gate_up_layout = GateUpLayout::kInterleaved;
  return stacked;
}

ExpertWeights mxfp4_weights(const ExpertWeights::Stacked& stacked) {
  return ExpertWeights::from_stacked(stacked, schemes::mxfp4_w4a16(), Activation::kSwigluOai);
}

TEST(ExpertWeightsTest, Mxfp4BlocksOfRankThreeAndFour) {
  for (bool rank_4 : {false, true}) {
    const ExpertWeights::Stacked stacked = mxfp4_stack(rank_4);
    const ExpertWeights weights = mxfp4_weights(stacked);
    EXPECT_EQ(weights.hidden, kHidden);
    EXPECT_EQ(weights.intermediate, kInner);
    EXPECT_EQ(weights.experts[1].up.bias.as<float>()[0], 2 * kInner + 1);
    EXPECT_EQ(weights.experts[0].up.scales.as<std::uint8_t>(),
              stacked.w13_scales.as<std::uint8_t>() + kHidden / 32);
    EXPECT_EQ(weights.experts[0].gate.values.shape(), Shape({kInner, kHidden / 2}));
    EXPECT_EQ(weights.experts[0].gate.values.stride(0), kHidden);
  }
}

struct BadWeights {
  std::string name;
  std::function<void(ExpertWeights&)> spoil;
  std::string fault;
};

class BadWeightsTest : public ::testing::TestWithParam<BadWeights> {};

TEST_P(BadWeightsTest, NamesTheMatrix) {
  ExpertWeights weights = mxfp4_weights(mxfp4_stack(true));
  weights.validate();
  GetParam().spoil(weights);
  const std::string text = testing::error_text([&] { weights.validate(); });
  EXPECT_NE(text.find(GetParam().fault), std::string::npos) << text;
}

INSTANTIATE_TEST_SUITE_P(
    All, BadWeightsTest,
    ::testing::Values(
        BadWeights{"no_experts", [](auto& w) { w.experts.clear(); }, "experts: was 0 experts"},
        BadWeights{"hidden_zero", [](auto& w) { w.hidden = 0; }, "weights.hidden: was 0"},
        BadWeights{"odd_hidden", [](auto& w) { w.hidden = 65; },
                   "weights.hidden: was 65; must be even"},
        BadWeights{"odd_intermediate", [](auto& w) { w.intermediate = 33; },
                   "weights.intermediate: was 33; must be even"},
        BadWeights{"missing_scales", [](auto& w) { w.experts[1].down.scales = {}; },
                   "weights.experts[1].down.scales: was undefined"},
        BadWeights{"wrong_scale_shape",
                   [](auto& w) {
                     w.experts[1].up.scales = w.experts[1].up.scales.slice(0, 0, kInner - 1);
                   },
                   "weights.experts[1].up.scales: was u8 [31, 2]; must be of shape [32, 2]"},
        BadWeights{"nan_scale",
                   [](auto& w) { w.experts[2].down.scales.template as<std::uint8_t>()[5] = 255; },
                   "weights.experts[2].down.scales: was 255 (NaN) at row 5, block 0"},
        BadWeights{"missing_values", [](auto& w) { w.experts[0].gate.values = {}; },
                   "weights.experts[0].gate.values: was undefined"},
        BadWeights{"values_by_columns",
                   [](auto& w) {
                     const TensorView v = w.experts[0].gate.values;
                     w.experts[0].gate.values =
                         TensorView(v.data(), v.dtype(), v.shape(), Shape{1, 32}, Device{});
                   },
                   "weights.experts[0].gate.values: was strides [1, 32]; must be contiguous"},
        BadWeights{"bf16_values",
                   [](auto& w) {
                     const TensorView v = w.experts[0].gate.values;
                     w.experts[0].gate.values = TensorView(v.data(), DType::kBF16, v.shape());
                   },
                   "weights.experts[0].gate.values: was bf16 [32, 32]; must be u8"},
        BadWeights{"bias_too_short",
                   [](auto& w) { w.experts[0].down.bias = w.experts[0].down.bias.slice(0, 0, 5); },
                   "weights.experts[0].down.bias: was f32 [5]; must be of shape [64]"},
        BadWeights{"bias_of_one_expert_missing", [](auto& w) { w.experts[2].down.bias = {}; },
                   "weights.experts[2].bias"},
        BadWeights{"bias_of_up_missing", [](auto& w) { w.experts[0].up.bias = {}; },
                   "weights.experts[0].bias"},
        BadWeights{"integer_bias",
                   [](auto& w) {
                     TensorView& v = w.experts[0].down.bias;
                     v = TensorView(v.data(), DType::kI32, v.shape());
                   },
                   "weights.experts[0].down.bias: was i32 [64]; must be f32, bf16 or f16"},
        BadWeights{"misaligned_bias",
                   [](auto& w) {
                     TensorView& v = w.experts[0].gate.bias;
                     v = TensorView(v.template as<char>() + 1, v.dtype(), v.shape());
                   },
                   "weights.experts[0].gate.bias: was misaligned"},
        BadWeights{"on_a_gpu",
                   [](auto& w) {
                     TensorView& v = w.experts[1].up.scales;
                     v = TensorView(v.data(), v.dtype(), v.shape(), v.strides(),
                                    Device{DeviceKind::kCuda, 0});
                   },
                   "weights.experts[1].up.scales: was on cuda:0; must be on cpu"},
        BadWeights{"up_for_a_non_gated_activation",
                   [](auto& w) { w.activation = Activation::kRelu2NoMul; },
                   "weights.experts[0].up.values: was u8 [32, 32]; must be undefined"},
        BadWeights{
            "activation_parameter",
            [](auto& w) { w.activation_params.limit = std::numeric_limits<float>::quiet_NaN(); },
            "limit"},
        BadWeights{"unknown_scheme", [](auto& w) { w.scheme.weights.group.cols = 16; },
                   "weights.scheme"}),
    [](const auto& info) { return info.param.name; });

TEST(ExpertWeightsTest, UnquantizedRefusesScalesAndOtherDTypes) {
  ExpertWeights::Stacked stacked;
  stacked.w13 = counted({kExperts, 2 * kInner, kHidden});
  stacked.w2 = counted({kExperts, kHidden, kInner});
  const auto load = [&](const QuantScheme& scheme) {
    return testing::error_text(
        [&] { ExpertWeights::from_stacked(stacked, scheme, Activation::kSilu); });
  };
  EXPECT_EQ(load(kF32Scheme), "no error");
  EXPECT_NE(load(schemes::unquantized(DType::kBF16)).find("gate.values: was f32"),
            std::string::npos);
  EXPECT_NE(load(schemes::mxfp4_w4a16()).find("w13: was f32"), std::string::npos);
  stacked.w2_scales = codes({kExperts, kHidden, 1});
  EXPECT_NE(load(kF32Scheme).find("scales cannot be used with f32"), std::string::npos);
}

TEST(ExpertWeightsTest, StackedShapesMustAgree) {
  const auto load = [](const std::function<void(ExpertWeights::Stacked&)>& spoil) {
    ExpertWeights::Stacked stacked = mxfp4_stack(true);
    spoil(stacked);
    return testing::error_text([&] { mxfp4_weights(stacked); });
  };
  EXPECT_EQ(load([](auto&) {}), "no error");
  EXPECT_NE(load([](auto& s) { s.w13 = {}; }).find("w13: was undefined"), std::string::npos);
  EXPECT_NE(load([](auto& s) {
              s.w2 = codes({2, kHidden, 1, 16});
            }).find("w2: was u8 [2,"),
            std::string::npos);
  EXPECT_NE(load([](auto& s) {
              s.w13 = codes({kExperts, 2 * kInner, 2, 8});
            }).find("w13: was u8"),
            std::string::npos);
  EXPECT_NE(load([](auto& s) {
              s.w13 = codes({kExperts, 2 * kInner - 1, 2, 16});
            }).find("even number of gate and up rows"),
            std::string::npos);
  EXPECT_NE(load([](auto& s) { s.w13_scales = {}; }).find("w13_scales: was undefined"),
            std::string::npos);
  EXPECT_NE(load([](auto& s) {
              s.w2_scales = codes({kExperts, kHidden, 2});
            }).find("w2_scales: was u8 [3, 64, 2]; must be of shape [3, 64, 1]"),
            std::string::npos);
  EXPECT_NE(load([](auto& s) {
              s.w2_bias = counted({kExperts, 2});
            }).find("w2_bias: was f32"),
            std::string::npos);
  EXPECT_NE(load([](auto& s) { s.transposed = true; }).find("transposed: was true"),
            std::string::npos);
}

TEST(FromStackedTest, SaysThatW2IsTransposed) {
  ExpertWeights::Stacked stacked;
  stacked.w13 = Tensor::zeros({3, 2 * kInner, kHidden}, DType::kBF16);
  stacked.w2 = Tensor::zeros({3, kInner, kHidden}, DType::kBF16);
  const std::string text = testing::error_text([&] {
    ExpertWeights::from_stacked(stacked, schemes::unquantized(DType::kBF16), Activation::kSilu);
  });
  EXPECT_EQ(text.find("w2: was bf16 [3, 32, 64]"), 0U) << text;
}

/// The same memory under the name of a device; nobody may touch it.
Tensor on_gpu(const Tensor& tensor) {
  return borrow(tensor.data(), tensor.dtype(), tensor.shape(), Device{DeviceKind::kCuda, 0});
}

TEST(FromStackedTest, DeviceMemoryIsNotTouched) {
  ExpertWeights::Stacked stacked = mxfp4_stack(true);
  std::memset(stacked.w13_scales.data(), 255, static_cast<std::size_t>(kHidden / 32));  // NaN
  EXPECT_NE(testing::error_text([&] { mxfp4_weights(stacked); }), "no error");
  ExpertWeights::Stacked gpu = stacked;
  for (Tensor ExpertWeights::Stacked::*part :
       {&ExpertWeights::Stacked::w13, &ExpertWeights::Stacked::w2,
        &ExpertWeights::Stacked::w13_scales, &ExpertWeights::Stacked::w2_scales,
        &ExpertWeights::Stacked::w13_bias, &ExpertWeights::Stacked::w2_bias}) {
    gpu.*part = on_gpu(stacked.*part);
  }
  const ExpertWeights weights = mxfp4_weights(gpu);
  EXPECT_EQ(weights.device(), (Device{DeviceKind::kCuda, 0}));
  EXPECT_TRUE(weights.borrowed);
  gpu.w2_bias = stacked.w2_bias;
  EXPECT_NE(
      testing::error_text([&] { mxfp4_weights(gpu); }).find("bias: was on cpu; must be on cuda:0"),
      std::string::npos);
}

TEST(FromStackedTest, E2m1AndE8m0ViewsAreTheBytesThatHoldThem) {
  const ExpertWeights::Stacked stacked = mxfp4_stack(true);
  const ExpertWeights expected = mxfp4_weights(stacked);
  EXPECT_FALSE(expected.borrowed);
  for (const bool rank_4 : {false, true}) {
    ExpertWeights::Stacked typed = stacked;
    const auto e2m1 = [&](const Tensor& t, std::int64_t rows, std::int64_t in) {
      return rank_4 ? borrow(t.data(), DType::kE2M1, {kExperts, rows, in / 32, 32})
                    : borrow(t.data(), DType::kE2M1, {kExperts, rows, in});
    };
    typed.w13 = e2m1(stacked.w13, 2 * kInner, kHidden);
    typed.w2 = e2m1(stacked.w2, kHidden, kInner);
    typed.w13_scales = borrow(stacked.w13_scales.data(), DType::kE8M0, stacked.w13_scales.shape());
    const ExpertWeights weights = mxfp4_weights(typed);
    EXPECT_TRUE(weights.borrowed);
    const TensorView &a = weights.experts[1].up.values, &b = expected.experts[1].up.values;
    EXPECT_EQ(a.data(), b.data());
    EXPECT_EQ(a.shape(), b.shape());
    EXPECT_EQ(a.strides(), b.strides());
    EXPECT_EQ(a.dtype(), DType::kU8);
  }
  ExpertWeights direct = expected;
  TensorView& values = direct.experts[2].down.values;
  values = TensorView(values.data(), DType::kE2M1, {kHidden, kInner});
  direct.validate();
  EXPECT_EQ(at(dequantize_weights(direct.experts[2].down, keys::mxfp4(), kInner), 9, 3),
            at(dequantize_weights(expected.experts[2].down, keys::mxfp4(), kInner), 9, 3));
  values = TensorView(values.data(), DType::kE2M1, {kHidden, kInner}, {kInner + 1, 1}, {});
  EXPECT_NE(
      testing::error_text([&] { direct.validate(); }).find("contiguous rows of an even number"),
      std::string::npos);
}

TEST(FromStackedTest, TiledScalesEqualFlatOnes) {
  const ExpertWeights::Stacked stacked = mxfp4_stack(false);
  const ExpertWeights flat = mxfp4_weights(stacked);
  ExpertWeights::Stacked tiled = stacked;
  tiled.scale_layout = ScaleLayout::kTiled128x4;
  for (Tensor ExpertWeights::Stacked::*part :
       {&ExpertWeights::Stacked::w13_scales, &ExpertWeights::Stacked::w2_scales}) {
    const Tensor& scales = stacked.*part;
    tiled.*part = Tensor::empty(tiled_scales_shape(scales.shape()), scales.dtype());
    tile_scales(scales, tiled.*part);
  }
  // As engines shape it: rows and columns rounded up.
  tiled.w13_scales = Tensor(tiled.w13_scales.reshape({kExperts, 128, 4}), tiled.w13_scales.owner());
  const ExpertWeights weights = mxfp4_weights(tiled);
  for (std::int64_t e = 0; e < kExperts; ++e) {
    for (const auto matrix : {&ExpertMatrices::gate, &ExpertMatrices::up, &ExpertMatrices::down}) {
      const TensorView& a = (weights.experts[static_cast<std::size_t>(e)].*matrix).scales;
      const TensorView& b = (flat.experts[static_cast<std::size_t>(e)].*matrix).scales;
      ASSERT_EQ(a.shape(), b.shape());
      for (std::int64_t r = 0; r < a.size(0); ++r) {
        for (std::int64_t c = 0; c < a.size(1); ++c) {
          EXPECT_EQ(a.as<std::uint8_t>()[r * a.stride(0) + c * a.stride(1)],
                    b.as<std::uint8_t>()[r * b.stride(0) + c * b.stride(1)]);
        }
      }
    }
  }
  tiled.w2_scales = stacked.w2_scales;
  EXPECT_NE(testing::error_text([&] { mxfp4_weights(tiled); }).find("w2_scales: was u8"),
            std::string::npos);
}

}  // namespace fusedmoe::weights_test
