// Quantized linear layers as published: what the bits mean.
#include "checkpoint/linear_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "gtest/gtest.h"
#include "linear_parts.h"

namespace fusedmoe::linear_layouts_test {

using testing::kCt;
using testing::kExperts;
using testing::Parts;
using testing::read_json;
using testing::TinyCheckpoints;

float value_of(const Tensor& tensor, std::int64_t row, std::int64_t col) {
  return load_f32(tensor.data(), tensor.dtype(), row * tensor.size(1) + col);
}

std::uint32_t word_of(const Tensor& tensor, std::int64_t row, std::int64_t col) {
  return tensor.as<const std::uint32_t>()[row * tensor.size(1) + col];
}

/// Every weight of expert 1's gate (96, 160) as the file's tensors define it.
using Formula = std::function<float(const Parts&, const std::string&, std::int64_t, std::int64_t)>;

void expect_bits(const std::string& scheme, CheckpointLayout layout, const Formula& formula) {
  const Parts parts(scheme, layout);
  const LayerWeights layer = parts.load();
  const Tensor actual = dequantize_weights(layer.experts.experts[1].gate,
                                           layer.experts.scheme.weights, layer.experts.hidden);
  for (std::int64_t out = 0; out < 96; ++out) {
    for (std::int64_t in = 0; in < 160; ++in) {
      ASSERT_EQ(value_of(actual, out, in), formula(parts, kExperts + "1.gate_proj.", out, in))
          << scheme << " at " << out << ", " << in;
    }
  }
}

TEST(PublishedBitsTest, Gptq) {
  // Words along the input; zero points along the output, stored minus one.
  const auto formula = [](std::int64_t offset) {
    return [offset](const Parts& p, const std::string& name, std::int64_t out, std::int64_t in) {
      const std::uint32_t code =
          word_of(p.tensors.at(name + "qweight"), in / 8, out) >> (4 * (in % 8)) & 15;
      const std::uint32_t zero =
          word_of(p.tensors.at(name + "qzeros"), in / 32, out / 8) >> (4 * (out % 8)) & 15;
      const auto difference = static_cast<float>(code) - static_cast<float>((zero + offset) & 15);
      return difference * value_of(p.tensors.at(name + "scales"), in / 32, out);
    };
  };
  expect_bits("int4_g32_zp", CheckpointLayout::kGptq, formula(1));
  expect_bits("int4_g32", CheckpointLayout::kGptq, formula(1));
  expect_bits("int4_g32_zp", CheckpointLayout::kGptqV2, formula(0));
}

TEST(PublishedBitsTest, Awq) {
  // Nibble i of a word, from the low end, is column {0, 2, 4, 6, 1, 3, 5, 7}[i] of its eight.
  constexpr std::array<std::int64_t, 8> kOrder{0, 2, 4, 6, 1, 3, 5, 7};
  const auto nibble = [&](const Tensor& words, std::int64_t row, std::int64_t column) {
    const auto position = std::find(kOrder.begin(), kOrder.end(), column % 8) - kOrder.begin();
    return word_of(words, row, column / 8) >> (4 * position) & 15;
  };
  expect_bits("int4_g32_zp", CheckpointLayout::kAwq,
              [&](const Parts& p, const std::string& name, std::int64_t out, std::int64_t in) {
                const std::uint32_t code = nibble(p.tensors.at(name + "qweight"), in, out);
                const std::uint32_t zero = nibble(p.tensors.at(name + "qzeros"), in / 32, out);
                return (static_cast<float>(code) - static_cast<float>(zero)) *
                       value_of(p.tensors.at(name + "scales"), in / 32, out);
              });
}

TEST(PublishedBitsTest, PackQuantized) {
  expect_bits(
      "int8_g32_zp", kCt,
      [](const Parts& p, const std::string& name, std::int64_t out, std::int64_t in) {
        const std::uint32_t code =
            word_of(p.tensors.at(name + "weight_packed"), out, in / 4) >> (8 * (in % 4)) & 255;
        const std::uint32_t zero =
            word_of(p.tensors.at(name + "weight_zero_point"), out / 4, in / 32) >> (8 * (out % 4)) &
            255;
        return (static_cast<float>(code) - static_cast<float>(zero)) *
               value_of(p.tensors.at(name + "weight_scale"), out, in / 32);
      });
}

TEST(PublishedBitsTest, Nvfp4GlobalScalesAreReciprocal) {
  const auto formula = [](const char* values, bool reciprocal, const char* global) {
    return [=](const Parts& p, const std::string& name, std::int64_t out, std::int64_t in) {
      const Tensor& codes = p.tensors.at(name + values);
      const std::uint8_t byte = codes.as<const std::uint8_t>()[out * 80 + in / 2];
      const float value = e2m1_to_f32(in % 2 ? byte >> 4 : byte & 15) *
                          value_of(p.tensors.at(name + "weight_scale"), out, in / 16);
      const float stored = *p.tensors.at(name + global).as<const float>();
      return value * (reciprocal ? 1 / stored : stored);
    };
  };
  expect_bits("nvfp4", CheckpointLayout::kModelOpt, formula("weight", false, "weight_scale_2"));
  expect_bits("nvfp4", kCt, formula("weight_packed", true, "weight_global_scale"));
}

TEST(PublishedBitsTest, BlockScalesMultiply) {
  expect_bits("fp8_block", CheckpointLayout::kFp8,
              [](const Parts& p, const std::string& name, std::int64_t out, std::int64_t in) {
                return value_of(p.tensors.at(name + "weight"), out, in) *
                       value_of(p.tensors.at(name + "weight_scale_inv"), out / 128, in / 128);
              });
}

// ------------------------------------------------------------------------------------------------

// A model in bf16 gets static scales in bf16.
TEST(LinearLayoutTest, InputScalesInTheModelsDtype) {
  Parts parts("fp8_tensor_static", kCt);
  const LayerWeights before = parts.load();
  for (auto& [name, tensor] : parts.tensors) {
    if (!name.ends_with("input_scale")) continue;
    const Tensor half = Tensor::empty(tensor.shape(), DType::kBF16);
    convert(tensor, half);
    tensor = half;
  }
  const LayerWeights after = parts.load();
  const TensorView scale = after.experts.experts[1].up.input_scale;
  ASSERT_EQ(scale.dtype(), DType::kF32);
  const float wanted = *before.experts.experts[1].up.input_scale.as<const float>();
  EXPECT_NEAR(*scale.as<const float>(), wanted, wanted / 128);
}

// Today's compressed-tensors writes a byte for each int4 value. Older files hold the same codes
// packed in words.
TEST(LinearLayoutTest, W4A8InWords) {
  Parts parts("w4a8", kCt, "qwen3_moe-wide");
  const LayerWeights before = parts.load();
  for (std::int64_t e = 0; e < 4; ++e) {
    for (const char* layer : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string name = kExperts + std::to_string(e) + "." + layer + ".weight";
      const Tensor bytes = parts.tensors.at(name);
      Tensor codes = Tensor::empty(bytes.shape(), DType::kU8);
      for (std::int64_t i = 0; i < codes.numel(); ++i) {
        codes.as<std::uint8_t>()[i] =
            static_cast<std::uint8_t>(bytes.as<const std::int8_t>()[i] + 8);
      }
      Tensor words = Tensor::empty({codes.size(0), codes.size(1) / 8}, DType::kI32);
      pack_codes(codes, words);
      parts.tensors.erase(name);
      parts.tensors[name + "_packed"] = words;
    }
  }
  const LayerWeights after = parts.load();
  const TensorView a = before.experts.experts[2].down.values;
  const TensorView b = after.experts.experts[2].down.values;
  for (std::int64_t row = 0; row < a.size(0); ++row) {
    for (std::int64_t col = 0; col < a.size(1); ++col) {
      ASSERT_EQ(a.as<const std::int32_t>()[row * a.stride(0) + col],
                b.as<const std::int32_t>()[row * b.stride(0) + col]);
    }
  }
}

// bf16 group scales become E4M3 and a channel scale on loading.
TEST(LinearLayoutTest, W4A8WithPlainGroupScales) {
  Parts parts("w4a8", kCt, "qwen3_moe-wide");
  const std::string scales = kExperts + "0.gate_proj.weight_scale";
  const Tensor plain = parts.copy(scales);
  store_f32(plain.data(), DType::kBF16, 0, 0.01F);
  store_f32(plain.data(), DType::kBF16, 1, 0.02F);
  const LayerWeights layer = parts.load();
  EXPECT_EQ(name(layer.experts.scheme), "w4a8");
  const WeightMatrix& gate = layer.experts.experts[0].gate;
  // Two groups of a row: the larger scale becomes 448 / 8, and its eighth goes to the channel.
  const float first = load_f32(plain.data(), DType::kBF16, 0);
  const float channel = load_f32(plain.data(), DType::kBF16, 1) / 448;
  EXPECT_EQ(*gate.global_scale.as<const float>(), channel * 8);
  EXPECT_EQ(load_f32(gate.scales.data(), DType::kE4M3, 1), 56);
  EXPECT_EQ(load_f32(gate.scales.data(), DType::kE4M3, 0),
            e4m3_to_f32(f32_to_e4m3(e4m3_to_f32(f32_to_e4m3(first / channel)) / 8)));

  parts.tensors[kExperts + "0.gate_proj.weight_chan_scale"] = Tensor::zeros({128, 1}, DType::kF32);
  EXPECT_NE(parts.error().find("bf16 beside weight_chan_scale"), std::string::npos)
      << parts.error();
}

// vLLM's names under quant_method fp8; transformers' are those that are written.
TEST(LinearLayoutTest, Fp8PerTensorUnderVllmsNames) {
  Parts parts("fp8_tensor_static", CheckpointLayout::kFp8);
  const LayerWeights before = parts.load();
  for (const auto& [from, to] : {std::pair{"weight_scale_inv", "weight_scale"},
                                 std::pair{"activation_scale", "input_scale"}}) {
    std::map<std::string, Tensor, std::less<>> renamed;
    for (const auto& [name, tensor] : parts.tensors) {
      std::string text = name;
      if (text.ends_with(from)) text.replace(text.size() - std::strlen(from), text.npos, to);
      renamed[text] = tensor;
    }
    parts.tensors = renamed;
  }
  const LayerWeights after = parts.load();
  EXPECT_EQ(*after.experts.experts[3].down.input_scale.as<const float>(),
            *before.experts.experts[3].down.input_scale.as<const float>());
}

// ModelOpt's FP8_PB_WO has blocks of 128 with scales of four dimensions.
TEST(LinearLayoutTest, ModelOptBlocksOfFourDimensions) {
  Parts parts("fp8_block_w8a16", CheckpointLayout::kModelOpt);
  EXPECT_EQ(parts.quantization()["quant_algo"], "FP8_PB_WO");
  parts.quantization()["quant_algo"] = "fp8_pb_wo";  // as ModelOpt 0.47 writes it
  const LayerWeights before = parts.load();
  for (auto& [name, tensor] : parts.tensors) {
    if (!name.ends_with("weight_scale")) continue;
    tensor = Tensor(tensor.reshape({tensor.size(0), 1, tensor.size(1), 1}), tensor.owner());
  }
  const LayerWeights after = parts.load();
  EXPECT_EQ(after.experts.experts[1].up.scales.shape(),
            before.experts.experts[1].up.scales.shape());
  EXPECT_EQ(name(after.experts.scheme), "fp8_block_w8a16");
}

// gpt-oss's original files: other names, and a config without a model_type.
TEST(LinearLayoutTest, OriginalNamesOfGptOss) {
  const Parts published("mxfp4_w4a16", CheckpointLayout::kGptOss, "gpt_oss");
  std::map<std::string, TensorView> tensors;
  for (const auto& [name, tensor] : published.tensors) {
    std::string text = name;
    for (const auto& [from, to] :
         {std::pair{"model.layers.0.", "block.0."},
          std::pair{"experts.gate_up_proj_bias", "mlp1_bias"},
          std::pair{"experts.down_proj_bias", "mlp2_bias"},
          std::pair{"experts.gate_up_proj_", "mlp1_weight."},
          std::pair{"experts.down_proj_", "mlp2_weight."}, std::pair{"router.", "gate."}}) {
      if (const std::size_t at = text.find(from); at != text.npos) {
        text.replace(at, std::strlen(from), to);
      }
    }
    tensors[text] = tensor;
  }
  const testing::TemporaryDirectory directory;
  save_safetensors(directory / "x.safetensors", tensors,
                   {{"config", R"({"num_hidden_layers": 1, "num_experts": 4,
                     "experts_per_token": 2, "hidden_size": 160, "intermediate_size": 96,
                     "swiglu_limit": 7.0})"}});
  CheckpointOptions options;
  options.family = Family::named("gpt_oss");
  const LayerWeights original =
      Checkpoint::open(directory / "x.safetensors", options).load_layer(0);
  const LayerWeights layer = published.load();
  EXPECT_EQ(name(original.experts.scheme), "mxfp4_w4a16");
  EXPECT_EQ(std::memcmp(original.experts.experts[3].down.values.data(),
                        layer.experts.experts[3].down.values.data(), 48),
            0);
}

TEST(LinearLayoutTest, ScalarsOfAnyRank) {
  Parts parts("nvfp4", CheckpointLayout::kModelOpt);
  const std::string name = kExperts + "2.down_proj.weight_scale_2";
  parts.tensors[name] = Tensor(parts.tensors.at(name).reshape({1}), parts.tensors.at(name).owner());
  EXPECT_EQ(parts.load().experts.num_experts(), 4);
}

// An expert without tokens in calibration: 0, of which the reciprocal is infinite.
TEST(LinearLayoutTest, UncalibratedExpertsTakeTheLargestInputScale) {
  Parts parts("nvfp4", kCt);
  const LayerWeights before = parts.load();
  float largest = 0;
  for (std::size_t e = 1; e < 4; ++e) {
    largest = std::max(largest, *before.experts.experts[e].down.input_scale.as<const float>());
  }
  *parts.copy(kExperts + "0.down_proj.input_global_scale").as<float>() = 0;
  const LayerWeights after = parts.load();
  EXPECT_EQ(*after.experts.experts[0].down.input_scale.as<const float>(), largest);
}

TEST(LinearLayoutTest, UnusedInputScalesAreAllowed) {
  Parts parts("fp8_tensor", CheckpointLayout::kFp8);
  parts.tensors[kExperts + "2.down_proj.activation_scale"] = Tensor::zeros({}, DType::kF32);
  EXPECT_FALSE(parts.load().experts.experts[2].down.input_scale.defined());
}

TEST(LinearLayoutTest, ModelOptFileBesideTheConfig) {
  const testing::TemporaryDirectory directory;
  const auto source =
      TinyCheckpoints::instance().quantized("qwen3_moe", "nvfp4", CheckpointLayout::kModelOpt);
  std::filesystem::copy(source, directory / "x");
  nlohmann::json config = read_json(source / "config.json");
  testing::write_file(
      directory / "x" / "hf_quant_config.json",
      R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}})");
  for (const bool null : {false, true}) {
    config.erase("quantization_config");
    if (null) config["quantization_config"] = nullptr;
    testing::write_file(directory / "x" / "config.json", config.dump());
    const Checkpoint checkpoint = Checkpoint::open(directory / "x");
    EXPECT_EQ(name(checkpoint.config().scheme), "nvfp4");
    EXPECT_EQ(checkpoint.load_layer(0).experts.num_experts(), 4);
  }
}

TEST(LinearLayoutTest, OlderNameOfTheConfig) {
  Parts parts("int4_g32", testing::kCt);
  parts.config["compression_config"] = parts.quantization();
  EXPECT_EQ(name(parts.load().experts.scheme), "int4_g32") << "twice the same";
  parts.config["compression_config"]["format"] = "naive-quantized";
  EXPECT_NE(testing::error_text([&] { parts.load(); })
                .find("config.compression_config: was something else than "
                      "config.quantization_config"),
            std::string::npos);
  parts.config["compression_config"] = parts.quantization();
  parts.config.erase("quantization_config");
  EXPECT_EQ(name(parts.load().experts.scheme), "int4_g32");
}

// The words of mlx have a type that nothing here reads.
TEST(LinearLayoutTest, TheConfigOfMlxStandsBeforeItsTensors) {
  const testing::TemporaryDirectory directory;
  const std::string header =
      R"({"model.layers.0.mlp.switch_mlp.up_proj.weight": {"dtype": "U32", "shape": [1],
          "data_offsets": [0, 4]}})";
  std::string length(8, '\0');
  length[0] = static_cast<char>(header.size());
  testing::write_file(directory / "model.safetensors", length + header + "1234");
  const auto error = [&](const char* key) {
    nlohmann::json config = nlohmann::json::parse(testing::tiny_config("qwen3_moe"));
    config[key] = {{"group_size", 64}, {"bits", 4}, {"mode", "affine"}};
    testing::write_file(directory / "config.json", config.dump());
    return testing::error_text([&] { Checkpoint::open(directory.path()); });
  };
  for (const char* key : {"quantization", "quantization_config"}) {
    const std::string wanted =
        directory.path().string() + ": config." + key + ".quant_method: was absent; must be";
    EXPECT_EQ(error(key).find(wanted), 0u) << error(key);
  }
  EXPECT_NE(error("other").find("dtype: was \"U32\""), std::string::npos) << error("other");
}

// DeepSeek quantizes its shared experts like the others.
TEST(LinearLayoutTest, QuantizedSharedExperts) {
  Parts parts("fp8_block", CheckpointLayout::kFp8, "deepseek_v3");
  parts.quantization()["modules_to_not_convert"] = nullptr;
  const std::string shared = "model.layers.0.mlp.shared_experts.";
  for (const char* layer : {"gate_proj", "up_proj", "down_proj"}) {
    for (const char* suffix : {".weight", ".weight_scale_inv"}) {
      parts.tensors[shared + layer + suffix] = parts.tensors.at(kExperts + "1." + layer + suffix);
    }
  }
  const LayerWeights layer = parts.load();
  ASSERT_TRUE(layer.shared_experts);
  EXPECT_EQ(name(layer.shared_experts->weights.scheme), "fp8_block");
  EXPECT_TRUE(testing::bitwise_equal(
      dequantize_weights(layer.shared_experts->weights.experts[0].down, keys::e4m3_block(), 96),
      dequantize_weights(layer.experts.experts[1].down, keys::e4m3_block(), 96)));

  parts.tensors.erase(shared + "up_proj.weight_scale_inv");
  EXPECT_NE(parts.error().find("shared_experts.up_proj.weight_scale_inv: missing"),
            std::string::npos);
}

}  // namespace fusedmoe::linear_layouts_test
