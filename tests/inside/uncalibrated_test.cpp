// Input scales of experts that saw no calibration data: one rule for every layout and value.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>

#include "linear_parts.h"

namespace fusedmoe::uncalibrated_test {

using testing::kExperts;
using testing::Parts;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Quantizer {
  const char* name;
  const char* scheme;
  CheckpointLayout layout;
  const char* suffix;  ///< of the input scale
};

const Quantizer kQuantizers[] = {
    {"ModelOptNvfp4", "nvfp4", CheckpointLayout::kModelOpt, ".input_scale"},
    {"ModelOptFp8", "fp8_tensor_static", CheckpointLayout::kModelOpt, ".input_scale"},
    {"CompressedNvfp4", "nvfp4", testing::kCt, ".input_global_scale"},
    {"CompressedFp8", "fp8_tensor_static", testing::kCt, ".input_scale"},
    {"StaticFp8", "fp8_tensor_static", CheckpointLayout::kFp8, ".activation_scale"},
};

class UncalibratedTest : public ::testing::TestWithParam<Quantizer> {
 protected:
  std::string scale_of(int expert, const std::string& layer) const {
    return kExperts + std::to_string(expert) + "." + layer + GetParam().suffix;
  }
  /// No value: the tensor is left out.
  void set(Parts& parts, int expert, const std::string& layer, std::optional<float> value) const {
    const std::string name = scale_of(expert, layer);
    if (value) {
      *parts.copy(name).as<float>() = *value;
    } else {
      parts.tensors.erase(name);
    }
  }
  Parts parts() const { return {GetParam().scheme, GetParam().layout}; }
};

float input_scale(const LayerWeights& layer, std::size_t expert,
                  WeightMatrix ExpertMatrices::*matrix) {
  return *(layer.experts.experts[expert].*matrix).input_scale.as<const float>();
}

TEST_P(UncalibratedTest, TakesTheLargestOfTheOthers) {
  // Each expert with a scale of its own.
  Parts original = parts();
  const bool reciprocal = std::string(GetParam().suffix) == ".input_global_scale";
  for (int e = 0; e < 4; ++e) {
    for (const char* layer : {"gate_proj", "up_proj", "down_proj"}) {
      const float scale = 0.5F * static_cast<float>(e + 1) * (layer[0] == 'd' ? 4 : 1);
      set(original, e, layer, reciprocal ? 1 / scale : scale);
    }
  }
  for (const std::optional<float> value :
       {std::optional<float>(), std::optional(0.0F), std::optional(-0.0F), std::optional(-1.0F),
        std::optional(kInfinity), std::optional(-kInfinity), std::optional(kNan)}) {
    Parts down = original;
    set(down, 3, "down_proj", value);
    const LayerWeights layer = down.load();
    EXPECT_EQ(input_scale(layer, 3, &ExpertMatrices::down), 6);
    EXPECT_EQ(input_scale(layer, 0, &ExpertMatrices::down), 2);
    EXPECT_EQ(input_scale(layer, 3, &ExpertMatrices::up), 2);

    Parts first = original;
    set(first, 0, "gate_proj", value);
    set(first, 1, "up_proj", value);
    set(first, 1, "gate_proj", value);
    EXPECT_EQ(input_scale(first.load(), 0, &ExpertMatrices::gate), 2);
    EXPECT_EQ(input_scale(first.load(), 1, &ExpertMatrices::up), 2);
    EXPECT_EQ(input_scale(first.load(), 2, &ExpertMatrices::up), 1.5F);
  }
}

TEST_P(UncalibratedTest, WithoutACalibratedExpertTheLayerIsRefused) {
  for (const auto& [value, text] :
       {std::pair{std::optional<float>(), "missing"}, std::pair{std::optional(0.0F), "0"},
        std::pair{std::optional(kNan), "nan"}, std::pair{std::optional(-2.0F), "-2"}}) {
    Parts all = parts();
    for (int e = 0; e < 4; ++e) set(all, e, "down_proj", value);
    const std::string wanted = kExperts + "{0-3}.down_proj" + GetParam().suffix + ": " + text +
                               ", and no other expert of the layer has a positive one";
    EXPECT_NE(all.error().find(wanted), std::string::npos) << all.error();
  }
}

// A rank reads the scales of experts that it does not hold, where its own are uncalibrated.
TEST_P(UncalibratedTest, RanksAgreeAndTheFileSaysWhichTheyAre) {
  Parts some = parts();
  set(some, 0, "up_proj", {});
  set(some, 0, "down_proj", 0.0F);
  const LayerWeights whole = some.load();
  const testing::TemporaryDirectory directory;
  const std::map<std::string, TensorView> views(some.tensors.begin(), some.tensors.end());
  save_safetensors(directory / "x.safetensors", views, {{"config", some.config.dump()}});
  const Checkpoint checkpoint = Checkpoint::open(directory / "x.safetensors");
  const LayerWeights half = checkpoint.load_layer(0, ParallelConfig{.ep_size = 4});
  ASSERT_EQ(half.experts.num_experts(), 1);
  for (const auto matrix : {&ExpertMatrices::up, &ExpertMatrices::down}) {
    EXPECT_EQ(input_scale(half, 0, matrix), input_scale(whole, 0, matrix));
  }
  const std::vector<UncalibratedScale> found = checkpoint.uncalibrated(0);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].tensor, scale_of(0, "up_proj"));
  EXPECT_EQ(found[0].value, "missing");
  EXPECT_EQ(found[0].used, input_scale(whole, 0, &ExpertMatrices::up));
  EXPECT_EQ(found[1].tensor, scale_of(0, "down_proj"));
  EXPECT_EQ(found[1].value, "0");
  // A file that changed tells nothing about the layer that was opened.
  for (const FileAccess access : {FileAccess::kMap, FileAccess::kRead}) {
    const auto path = directory / "x.safetensors";
    const Checkpoint changed = Checkpoint::open(path, {access});
    std::filesystem::last_write_time(
        path, std::filesystem::last_write_time(path) + std::chrono::hours(1));
    EXPECT_NE(testing::error_text([&] {
                changed.uncalibrated(0);
              }).find("was written to after it was opened"),
              std::string::npos);
  }
  EXPECT_TRUE(Parts(parts()).error() == "no error");
}

INSTANTIATE_TEST_SUITE_P(All, UncalibratedTest, ::testing::ValuesIn(kQuantizers),
                         [](const auto& info) { return std::string(info.param.name); });

// Shared experts are one expert: there is nobody to take a scale from.
TEST(UncalibratedSharedTest, IsRefused) {
  Parts parts("fp8_tensor_static", CheckpointLayout::kModelOpt, "deepseek_v3");
  parts.quantization()["ignore"] = nullptr;
  const std::string shared = "model.layers.0.mlp.shared_experts.";
  for (const char* layer : {"gate_proj", "up_proj", "down_proj"}) {
    for (const char* suffix : {".weight", ".weight_scale", ".input_scale"}) {
      parts.tensors[shared + layer + suffix] = parts.tensors.at(kExperts + "1." + layer + suffix);
    }
  }
  EXPECT_EQ(parts.error(), "no error");
  *parts.copy(shared + "down_proj.input_scale").as<float>() = kInfinity;
  EXPECT_NE(parts.error().find(shared + "down_proj.input_scale: inf, and no other expert"),
            std::string::npos)
      << parts.error();
}

// Scales of a caller have no others to be taken from: each must be usable.
TEST(UncalibratedCallerTest, StacksAreRefused) {
  for (const char* scheme : {"nvfp4", "fp8_tensor_static"}) {
    const bool nvfp4 = scheme[0] == 'n';
    ExpertWeights::Stacked stacked;
    const DType values = nvfp4 ? DType::kU8 : DType::kE4M3;
    const std::int64_t columns = nvfp4 ? 16 : 32;
    stacked.w13 = Tensor::zeros({2, 64, columns}, values);
    stacked.w2 = Tensor::zeros({2, 32, columns}, values);
    const Tensor ones = Tensor::empty({2}, DType::kF32);
    std::fill_n(ones.as<float>(), 2, 1.0F);
    if (nvfp4) {
      stacked.w13_scales = Tensor::zeros({2, 64, 2}, DType::kE4M3);
      stacked.w2_scales = Tensor::zeros({2, 32, 2}, DType::kE4M3);
      stacked.w13_global_scales = stacked.w2_global_scales = ones;
    } else {
      stacked.w13_scales = stacked.w2_scales = ones;
    }
    stacked.w13_input_scales = stacked.w2_input_scales = ones;
    const auto make = [&] {
      ExpertWeights::from_stacked(stacked, parse_scheme(scheme), Activation::kSilu);
    };
    EXPECT_EQ(testing::error_text(make), "no error");
    for (const float value : {0.0F, -1.0F, kInfinity, kNan}) {
      stacked.w2_input_scales = Tensor::empty({2}, DType::kF32);
      stacked.w2_input_scales.as<float>()[0] = 1;
      stacked.w2_input_scales.as<float>()[1] = value;
      EXPECT_NE(testing::error_text(make).find("experts[1].down.input_scale: was"),
                std::string::npos)
          << scheme << value;
    }
  }
}

TEST(UncalibratedCallerTest, IsRefused) {
  for (const auto& [scheme, layout] :
       {std::pair{"nvfp4", CheckpointLayout::kModelOpt},
        std::pair{"fp8_tensor_static", CheckpointLayout::kModelOpt}}) {
    const LayerWeights layer = Parts(scheme, layout).load();
    for (const float value : {0.0F, -1.0F, kInfinity, kNan}) {
      ExpertWeights weights = layer.experts;
      const Tensor scale = Tensor::empty({1}, DType::kF32);
      *scale.as<float>() = value;
      weights.experts[2].up.input_scale = scale;
      EXPECT_NE(testing::error_text([&] { weights.validate(); }).find("experts[2].up.input_scale"),
                std::string::npos)
          << scheme << value;
    }
  }
}

}  // namespace fusedmoe::uncalibrated_test
