// DeepSeek-V4: pairs of E2M1 as signed bytes, low nibble first, with powers of two per 32; FP8 with
// powers of two per 128 x 128.
#include <gtest/gtest.h>

#include <cmath>

#include "fusedmoe/quant.h"
#include "linear_parts.h"

namespace fusedmoe::deepseek_v4_test {

using testing::Parts;

float e2m1(unsigned code) {
  constexpr float kValues[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  return code < 8 ? kValues[code] : -kValues[code - 8];
}

Tensor random_bytes(Shape shape, DType dtype, unsigned low, unsigned high) {
  static unsigned state = 12345;
  Tensor result = Tensor::empty(shape, dtype);
  for (std::int64_t i = 0; i < result.nbytes(); ++i) {
    state = state * 1664525U + 1013904223U;
    result.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(low + (state >> 16) % (high - low));
  }
  return result;
}

Parts deepseek_v4(const std::string& expert_dtype, DType scales) {
  Parts parts("fp8_block_ue8m0", CheckpointLayout::kFp8, "deepseek_v3-wide");
  parts.config["model_type"] = "deepseek_v4";
  parts.config["expert_dtype"] = expert_dtype;
  parts.config["n_group"] = parts.config["topk_group"] = 1;
  parts.tensors.clear();
  const std::string block = "layers.0.ffn.";
  const auto add = [&](const std::string& layer, std::int64_t out, std::int64_t in, bool fp4) {
    parts.tensors[block + layer + ".weight"] = fp4 ? random_bytes({out, in / 2}, DType::kI8, 0, 256)
                                                   : random_bytes({out, in}, DType::kE4M3, 0, 0x7f);
    const Shape grid = fp4 ? Shape{out, in / 32} : Shape{out / 128, in / 128};
    parts.tensors[block + layer + ".scale"] = random_bytes(grid, scales, 100, 130);
  };
  const bool fp4 = expert_dtype == "fp4";
  for (int e = 0; e < 4; ++e) {
    const std::string expert = "experts." + std::to_string(e) + ".";
    add(expert + "w1", 128, 256, fp4);
    add(expert + "w3", 128, 256, fp4);
    add(expert + "w2", 256, 128, fp4);
  }
  add("shared_experts.w1", 128, 256, false);
  add("shared_experts.w3", 128, 256, false);
  add("shared_experts.w2", 256, 128, false);
  parts.tensors[block + "gate.weight"] = Tensor::zeros({4, 256}, DType::kBF16);
  parts.tensors[block + "gate.bias"] = Tensor::zeros({4}, DType::kF32);
  return parts;
}

void expect_v4(const Parts& parts, const std::string& layer, const WeightMatrix& matrix,
               const QuantKey& key, std::int64_t out, std::int64_t in) {
  const Tensor actual = dequantize_weights(matrix, key, in);
  const auto* bytes = parts.tensors.at("layers.0.ffn." + layer + ".weight").as<std::uint8_t>();
  const auto* scales = parts.tensors.at("layers.0.ffn." + layer + ".scale").as<std::uint8_t>();
  const bool fp4 = key.value == DType::kE2M1;
  for (std::int64_t r = 0; r < out; ++r) {
    for (std::int64_t c = 0; c < in; ++c) {
      const std::int64_t pair = r * (in / 2) + c / 2;
      const float value =
          fp4 ? e2m1(c % 2 ? bytes[pair] >> 4 : bytes[pair] & 15) : e4m3_to_f32(bytes[r * in + c]);
      const int power =
          fp4 ? scales[r * (in / 32) + c / 32] : scales[r / 128 * (in / 128) + c / 128];
      ASSERT_EQ(actual.as<const float>()[r * in + c], std::ldexp(value, power - 127))
          << layer << " " << r << " " << c;
    }
  }
}

TEST(DeepseekV4Test, ExpertsInPairsOfE2M1) {
  for (const DType scales : {DType::kE8M0, DType::kU8}) {
    Parts parts = deepseek_v4("fp4", DType::kE8M0);
    for (auto& [name, tensor] : parts.tensors) {
      if (!name.ends_with(".scale") || name.find("shared") != name.npos) continue;
      tensor = Tensor(TensorView(tensor.data(), scales, tensor.shape()), tensor.owner());
    }
    const LayerWeights layer = parts.load();
    EXPECT_EQ(name(layer.experts.scheme), "mxfp4_w4a16");
    EXPECT_EQ(name(layer.shared_experts->weights.scheme), "fp8_block_ue8m0");
    for (const int e : {0, 3}) {
      const std::string expert = "experts." + std::to_string(e) + ".";
      const ExpertMatrices& matrices = layer.experts.experts[static_cast<std::size_t>(e)];
      expect_v4(parts, expert + "w1", matrices.gate, keys::mxfp4(), 128, 256);
      expect_v4(parts, expert + "w3", matrices.up, keys::mxfp4(), 128, 256);
      expect_v4(parts, expert + "w2", matrices.down, keys::mxfp4(), 256, 128);
    }
    const ExpertMatrices& shared = layer.shared_experts->weights.experts[0];
    expect_v4(parts, "shared_experts.w2", shared.down, keys::e4m3_block(), 256, 128);
  }
}

TEST(DeepseekV4Test, ExpertsInFp8) {
  Parts parts = deepseek_v4("fp8", DType::kE8M0);
  const LayerWeights layer = parts.load();
  EXPECT_EQ(name(layer.experts.scheme), "fp8_block_ue8m0");
  expect_v4(parts, "experts.2.w1", layer.experts.experts[2].gate, keys::e4m3_block(), 128, 256);
  expect_v4(parts, "shared_experts.w3", layer.shared_experts->weights.experts[0].up,
            keys::e4m3_block(), 128, 256);
  parts.config.erase("expert_dtype");
  EXPECT_EQ(parts.error(), "no error");
  parts.config["expert_dtype"] = "fp4";
  EXPECT_NE(
      parts.error().find("config.expert_dtype says that the experts are mxfp4_w4a16, but their "
                         "tensors are fp8_block_w8a16, so 24 tensors"),
      std::string::npos)
      << parts.error();
  Parts fp4 = deepseek_v4("fp4", DType::kE8M0);
  fp4.config["expert_dtype"] = "fp8";
  EXPECT_NE(fp4.error().find("config.expert_dtype says that the experts are fp8_block_ue8m0, but "
                             "their tensors are mxfp4_w4a16, so 24 tensors"),
            std::string::npos)
      << fp4.error();
  parts.config["expert_dtype"] = "int3";
  EXPECT_NE(parts.error().find("config.expert_dtype: was \"int3\"; must be fp8 or fp4"),
            std::string::npos);
  parts.config["expert_dtype"] = "fp8";
  parts.copy("layers.0.ffn.experts.1.w2.scale").as<std::uint8_t>()[1] = 255;
  EXPECT_NE(parts.error().find("layers.0.ffn.experts.1.w2.scale: was nan at row 1"),
            std::string::npos)
      << parts.error();
}

}  // namespace fusedmoe::deepseek_v4_test
