// quantize -> write -> load -> dequantize is exact, for every layout, scheme and kind of family.
#include "tools/quantize_checkpoint.h"

#include <array>
#include <cmath>
#include <map>

#include "checkpoint/linear_codec.h"
#include "checkpoint/quant_config.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "testing/compare.h"
#include "tiny_checkpoint.h"

namespace fusedmoe::quantize_checkpoint_test {

using testing::bitwise_equal;
using testing::error_text;
using testing::read_json;
using testing::tensors_of;
using testing::TinyCheckpoints;

struct RoundTrip {
  std::string family, scheme;
  CheckpointLayout layout;

  std::string name() const {
    std::string text = family + "_" + scheme + "_" + std::string(fusedmoe::name(layout));
    for (char& c : text) {
      if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
    }
    return text;
  }
};

constexpr std::array kLayouts{CheckpointLayout::kGptOss,           CheckpointLayout::kFp8,
                              CheckpointLayout::kModelOpt,         CheckpointLayout::kGptq,
                              CheckpointLayout::kGptqV2,           CheckpointLayout::kAwq,
                              CheckpointLayout::kCompressedTensors};

/// Every scheme in every layout that can say it for one family, one scheme per layout for all.
std::vector<RoundTrip> round_trips() {
  std::vector<RoundTrip> cases;
  const auto add = [&](const std::string& family, const std::string& scheme) {
    for (const CheckpointLayout layout : kLayouts) {
      const bool stacked = layout == CheckpointLayout::kGptOss;
      if (stacked && family != "gpt_oss") continue;
      if (!checkpoint::quantization_config({layout, parse_scheme(scheme)}, {})) continue;
      const std::int64_t group = parse_scheme(scheme).weights.group.cols;
      const bool whole_groups =
          layout == CheckpointLayout::kCompressedTensors || layout == CheckpointLayout::kGptq ||
          layout == CheckpointLayout::kGptqV2 || layout == CheckpointLayout::kAwq;
      cases.push_back({family + (whole_groups && group > 32 ? "-wide" : ""), scheme, layout});
    }
  };
  for (const NamedScheme& entry : named_schemes()) {
    if (entry.scheme.weights.quantized()) add("qwen3_moe", entry.name);
  }
  for (const char* family :
       {"gpt_oss", "mixtral", "qwen2_moe", "deepseek_v3", "llama4", "granitemoe"}) {
    for (const char* scheme :
         {"fp8_block", "fp8_tensor_static", "mxfp4_w4a16", "nvfp4", "int4_g32_zp"}) {
      add(family, scheme);
    }
  }
  return cases;
}

class RoundTripTest : public ::testing::TestWithParam<RoundTrip> {
 protected:
  void SetUp() override { set_num_threads(1); }
  void TearDown() override { set_num_threads(0); }
};

float largest_magnitude(const Tensor& values) {
  float largest = 0;
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    largest = std::max(largest, std::abs(values.as<const float>()[i]));
  }
  return largest;
}

/// The matrix as it is in memory right after quantization.
Tensor expected_values(const WeightMatrix& source, DType dtype, const RoundTrip& trip, float amax) {
  const QuantKey key = parse_scheme(trip.scheme).weights;
  const std::int64_t in = source.values.size(1);
  QuantizeOptions options;
  if (const checkpoint::LinearLayout* layout = checkpoint::find_linear_layout(trip.layout, key)) {
    options.scale_dtype = checkpoint::scale_dtype(*layout);
  }
  std::optional<float> global;
  if (key == keys::nvfp4()) global = checkpoint::amax_with_reciprocal(amax);
  const Tensor values = dequantize_weights(source, schemes::unquantized(dtype).weights, in);
  return dequantize_weights(quantize_weights(values, key, options, global).view(), key, in);
}

float amax_of(const WeightMatrix& source, DType dtype) {
  return largest_magnitude(
      dequantize_weights(source, schemes::unquantized(dtype).weights, source.values.size(1)));
}

/// compressed-tensors has one scale rule for MXFP4 and int8 activations, and no words for others.
std::string read_as(const RoundTrip& trip) {
  if (trip.layout != CheckpointLayout::kCompressedTensors) return trip.scheme;
  if (trip.scheme == "mxfp4") return "mxfp4:even";
  return trip.scheme.ends_with("int8") || trip.scheme == "int8_w8a8" ? trip.scheme + ":full"
                                                                     : trip.scheme;
}

TEST_P(RoundTripTest, IsExact) {
  const RoundTrip& trip = GetParam();
  const TinyCheckpoints& tiny = TinyCheckpoints::instance();
  const Checkpoint source = Checkpoint::open(tiny.source(trip.family));
  const Checkpoint written =
      Checkpoint::open(tiny.quantized(trip.family, trip.scheme, trip.layout));
  EXPECT_EQ(name(written.config().scheme), read_as(trip));
  EXPECT_EQ(written.config().layout, trip.layout);
  ASSERT_EQ(written.moe_layers(), source.moe_layers());

  const LayerWeights before = source.load_layer(0), after = written.load_layer(0);
  EXPECT_EQ(after.experts.scheme, parse_scheme(read_as(trip)));
  const QuantKey key = after.experts.scheme.weights;
  const DType dtype = before.experts.scheme.weights.value;
  const bool input_scale = checkpoint::has_input_scale(after.experts.scheme);
  for (std::size_t e = 0; e < before.experts.experts.size(); ++e) {
    const ExpertMatrices &from = before.experts.experts[e], &to = after.experts.experts[e];
    const float amax13 = std::max(amax_of(from.gate, dtype), amax_of(from.up, dtype));
    const auto check = [&](const WeightMatrix& a, const WeightMatrix& b, float amax) {
      const std::int64_t in = a.values.size(1);
      EXPECT_TRUE(
          bitwise_equal(dequantize_weights(b, key, in), expected_values(a, dtype, trip, amax)));
      ASSERT_EQ(b.bias.defined(), a.bias.defined());
      for (std::int64_t i = 0; a.bias.defined() && i < a.bias.size(0); ++i) {
        EXPECT_EQ(load_f32(a.bias.data(), a.bias.dtype(), i * a.bias.stride(0)),
                  load_f32(b.bias.data(), b.bias.dtype(), i * b.bias.stride(0)));
      }
      EXPECT_EQ(b.input_scale.defined(), input_scale);
    };
    check(from.gate, to.gate, amax13);
    check(from.up, to.up, amax13);
    check(from.down, to.down, amax_of(from.down, dtype));
  }
  EXPECT_TRUE(bitwise_equal(after.router_weights.weight, before.router_weights.weight));
  ASSERT_EQ(after.shared_experts.has_value(), before.shared_experts.has_value());
  if (before.shared_experts) {
    const ExpertWeights &a = before.shared_experts->weights, &b = after.shared_experts->weights;
    EXPECT_EQ(a.scheme, b.scheme);
    EXPECT_TRUE(bitwise_equal(a.experts[0].down.values, b.experts[0].down.values));
  }
}

INSTANTIATE_TEST_SUITE_P(All, RoundTripTest, ::testing::ValuesIn(round_trips()),
                         [](const auto& info) { return info.param.name(); });

// ------------------------------------------------------------------------------------------------
// Names, dtypes and shapes as published. Gate is (96, 160), down (160, 96).

using Names = std::map<std::string, std::string>;

/// "suffix" -> "dtype shape" of the tensors of one linear layer.
Names layer_tensors(const std::string& scheme, CheckpointLayout layout, const std::string& layer,
                    const std::string& family = "qwen3_moe") {
  const auto path = TinyCheckpoints::instance().quantized(family, scheme, layout);
  Names names;
  for (const auto& [name, tensor] : tensors_of(path)) {
    const std::string prefix = "model.layers.0.mlp.experts.1." + layer + ".";
    if (!name.starts_with(prefix)) continue;
    names[name.substr(prefix.size())] =
        std::string(fusedmoe::name(tensor.dtype())) + " " + to_string(tensor.shape());
  }
  return names;
}

TEST(QuantizedNamesTest, DeepseekBlocks) {
  EXPECT_EQ(layer_tensors("fp8_block", CheckpointLayout::kFp8, "gate_proj"),
            (Names{{"weight", "e4m3 [96, 160]"}, {"weight_scale_inv", "f32 [1, 2]"}}));
  EXPECT_EQ(layer_tensors("fp8_block", CheckpointLayout::kFp8, "down_proj"),
            (Names{{"weight", "e4m3 [160, 96]"}, {"weight_scale_inv", "f32 [2, 1]"}}));
}

TEST(QuantizedNamesTest, Fp8PerTensor) {
  EXPECT_EQ(layer_tensors("fp8_tensor", CheckpointLayout::kFp8, "up_proj"),
            (Names{{"weight", "e4m3 [96, 160]"}, {"weight_scale_inv", "f32 []"}}));
  EXPECT_EQ(layer_tensors("fp8_tensor_static", CheckpointLayout::kFp8, "up_proj"),
            (Names{{"weight", "e4m3 [96, 160]"},
                   {"weight_scale_inv", "f32 []"},
                   {"activation_scale", "f32 []"}}));
  const Names with_input{
      {"weight", "e4m3 [96, 160]"}, {"weight_scale", "f32 []"}, {"input_scale", "f32 []"}};
  EXPECT_EQ(layer_tensors("fp8_tensor_static", CheckpointLayout::kModelOpt, "up_proj"), with_input);
  EXPECT_EQ(
      layer_tensors("fp8_tensor_static", CheckpointLayout::kCompressedTensors, "up_proj"),
      (Names{
          {"weight", "e4m3 [96, 160]"}, {"weight_scale", "f32 [1]"}, {"input_scale", "f32 [1]"}}));
}

TEST(QuantizedNamesTest, PerChannel) {
  const auto ct = CheckpointLayout::kCompressedTensors;
  EXPECT_EQ(layer_tensors("fp8_channel_token", ct, "gate_proj"),
            (Names{{"weight", "e4m3 [96, 160]"}, {"weight_scale", "f32 [96, 1]"}}));
  EXPECT_EQ(layer_tensors("fp8_channel_token", CheckpointLayout::kModelOpt, "gate_proj"),
            (Names{{"weight", "e4m3 [96, 160]"}, {"weight_scale", "f32 [96]"}}));
  EXPECT_EQ(layer_tensors("int8_w8a8", ct, "gate_proj"),
            (Names{{"weight", "i8 [96, 160]"}, {"weight_scale", "f32 [96, 1]"}}));
}

TEST(QuantizedNamesTest, Nvfp4) {
  EXPECT_EQ(layer_tensors("nvfp4", CheckpointLayout::kModelOpt, "gate_proj"),
            (Names{{"weight", "u8 [96, 80]"},
                   {"weight_scale", "e4m3 [96, 10]"},
                   {"weight_scale_2", "f32 []"},
                   {"input_scale", "f32 []"}}));
  EXPECT_EQ(layer_tensors("nvfp4", CheckpointLayout::kCompressedTensors, "gate_proj"),
            (Names{{"weight_packed", "u8 [96, 80]"},
                   {"weight_scale", "e4m3 [96, 10]"},
                   {"weight_global_scale", "f32 [1]"},
                   {"input_global_scale", "f32 [1]"}}));
}

TEST(QuantizedNamesTest, Microscaling) {
  const auto ct = CheckpointLayout::kCompressedTensors;
  EXPECT_EQ(layer_tensors("mxfp4", ct, "gate_proj"),
            (Names{{"weight_packed", "u8 [96, 80]"}, {"weight_scale", "u8 [96, 5]"}}));
  EXPECT_EQ(layer_tensors("mxfp8", CheckpointLayout::kModelOpt, "gate_proj"),
            (Names{{"weight", "e4m3 [96, 160]"}, {"weight_scale", "u8 [96, 5]"}}));
}

TEST(QuantizedNamesTest, PackedIntegers) {
  const auto ct = CheckpointLayout::kCompressedTensors;
  EXPECT_EQ(layer_tensors("int4_g32", ct, "gate_proj"), (Names{{"weight_packed", "i32 [96, 20]"},
                                                               {"weight_scale", "bf16 [96, 5]"},
                                                               {"weight_shape", "i64 [2]"}}));
  EXPECT_EQ(layer_tensors("int4_g32_zp", ct, "gate_proj"),
            (Names{{"weight_packed", "i32 [96, 20]"},
                   {"weight_scale", "bf16 [96, 5]"},
                   {"weight_zero_point", "i32 [12, 5]"},
                   {"weight_shape", "i64 [2]"}}));
  EXPECT_EQ(layer_tensors("int8_channel", ct, "gate_proj"),
            (Names{{"weight_packed", "i32 [96, 40]"},
                   {"weight_scale", "bf16 [96, 1]"},
                   {"weight_shape", "i64 [2]"}}));
  EXPECT_EQ(layer_tensors("w4a8", ct, "gate_proj", "qwen3_moe-wide"),
            (Names{{"weight", "i8 [128, 256]"}, {"weight_scale", "bf16 [128, 2]"}}));
}

// compressed-tensors, GPTQModel and AutoAWQ refuse rows of parts of groups.
TEST(QuantizedNamesTest, PartsOfGroupsAreRefused) {
  for (const auto& [scheme, layout] :
       {std::pair{"int4_g64", CheckpointLayout::kCompressedTensors},
        std::pair{"int8_g128", CheckpointLayout::kGptq},
        std::pair{"w4a8", CheckpointLayout::kCompressedTensors},
        std::pair{"fp8_block", CheckpointLayout::kCompressedTensors}}) {
    const std::string error = error_text([scheme = scheme, layout = layout] {
      TinyCheckpoints::instance().quantized("qwen3_moe", scheme, layout);
    });
    EXPECT_NE(error.find("160 is no multiple of"), std::string::npos) << scheme << ": " << error;
  }
}

TEST(QuantizedNamesTest, GptqAndAwq) {
  EXPECT_EQ(layer_tensors("int4_g32", CheckpointLayout::kGptq, "gate_proj"),
            (Names{{"qweight", "i32 [20, 96]"},
                   {"qzeros", "i32 [5, 12]"},
                   {"scales", "f16 [5, 96]"},
                   {"g_idx", "i32 [160]"}}));
  EXPECT_EQ(layer_tensors("int8_channel_zp", CheckpointLayout::kGptqV2, "gate_proj"),
            (Names{{"qweight", "i32 [40, 96]"},
                   {"qzeros", "i32 [1, 24]"},
                   {"scales", "f16 [1, 96]"},
                   {"g_idx", "i32 [160]"}}));
  EXPECT_EQ(
      layer_tensors("int4_g32_zp", CheckpointLayout::kAwq, "gate_proj"),
      (Names{{"qweight", "i32 [160, 12]"}, {"qzeros", "i32 [5, 12]"}, {"scales", "f16 [5, 96]"}}));
}

TEST(QuantizedNamesTest, GptOssStack) {
  const auto path =
      TinyCheckpoints::instance().quantized("gpt_oss", "mxfp4_w4a16", CheckpointLayout::kGptOss);
  Names names;
  for (const auto& [name, tensor] : tensors_of(path)) {
    names[name] = std::string(fusedmoe::name(tensor.dtype())) + " " + to_string(tensor.shape());
  }
  const std::string mlp = "model.layers.0.mlp.";
  EXPECT_EQ(names, (Names{{mlp + "experts.gate_up_proj_blocks", "u8 [4, 192, 5, 16]"},
                          {mlp + "experts.gate_up_proj_scales", "u8 [4, 192, 5]"},
                          {mlp + "experts.gate_up_proj_bias", "bf16 [4, 192]"},
                          {mlp + "experts.down_proj_blocks", "u8 [4, 160, 3, 16]"},
                          {mlp + "experts.down_proj_scales", "u8 [4, 160, 3]"},
                          {mlp + "experts.down_proj_bias", "bf16 [4, 160]"},
                          {mlp + "router.weight", "bf16 [4, 160]"},
                          {mlp + "router.bias", "bf16 [4]"}}));
}

TEST(QuantizedNamesTest, FamiliesKeepTheirOwn) {
  const auto has = [](const char* family, const std::string& name) {
    return tensors_of(
               TinyCheckpoints::instance().quantized(family, "nvfp4", CheckpointLayout::kModelOpt))
        .contains(name);
  };
  EXPECT_TRUE(has("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight_scale_2"));
  EXPECT_TRUE(has("gpt_oss", "model.layers.0.mlp.experts.3.down_proj.bias"));
  EXPECT_TRUE(
      has("llama4", "language_model.model.layers.0.feed_forward.experts.0.up_proj.weight_scale"));
  EXPECT_TRUE(has("deepseek_v3", "model.layers.0.mlp.shared_experts.up_proj.weight"));
}

// ------------------------------------------------------------------------------------------------

TEST(QuantizeCheckpointTest, ConfigNamesWhatIsNotQuantized) {
  const auto config = [](const char* scheme, CheckpointLayout layout) {
    const auto path = TinyCheckpoints::instance().quantized("deepseek_v3", scheme, layout);
    return read_json(path / "config.json").at("quantization_config");
  };
  const nlohmann::json plain{
      "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_experts.down_proj",
      "model.layers.0.mlp.shared_experts.gate_proj", "model.layers.0.mlp.shared_experts.up_proj"};
  EXPECT_EQ(config("fp8_block", CheckpointLayout::kFp8),
            (nlohmann::json{{"quant_method", "fp8"},
                            {"fmt", "e4m3"},
                            {"activation_scheme", "dynamic"},
                            {"weight_block_size", {128, 128}},
                            {"modules_to_not_convert", plain}}));
  const nlohmann::json ct = config("nvfp4", CheckpointLayout::kCompressedTensors);
  EXPECT_EQ(ct.at("ignore"), plain);
  EXPECT_EQ(ct.at("format"), "nvfp4-pack-quantized");
  const nlohmann::json& weights = ct.at("config_groups").at("group_0").at("weights");
  EXPECT_EQ(weights.at("strategy"), "tensor_group");
  EXPECT_EQ(weights.at("group_size"), 16);
  EXPECT_EQ(config("nvfp4", CheckpointLayout::kModelOpt).at("quant_algo"), "NVFP4");
  EXPECT_TRUE(config("int4_g32_zp", CheckpointLayout::kGptq)
                  .at("dynamic")
                  .contains("-:^model\\.layers\\.0\\.mlp\\.gate$"));
}

TEST(QuantizeCheckpointTest, UsualLayouts) {
  const auto usual = [](Family family, const char* scheme) {
    return std::string(name(checkpoint::usual_layout(family, parse_scheme(scheme))));
  };
  EXPECT_EQ(usual(Family::named("gpt_oss"), "mxfp4_w4a16"), "gpt-oss");
  EXPECT_EQ(usual(Family::named("qwen3_moe"), "mxfp4_w4a16"), "compressed-tensors");
  EXPECT_EQ(usual(Family::named("deepseek_v3"), "fp8_block_ue8m0"), "fp8");
  EXPECT_EQ(usual(Family::named("mixtral"), "nvfp4"), "modelopt");
  EXPECT_EQ(usual(Family::named("mixtral"), "int4_g128"), "compressed-tensors");
}

// Shards, several layers, and everything else of the directory.
TEST(QuantizeCheckpointTest, CopiesEverythingElse) {
  const testing::TemporaryDirectory directory;
  SynthOptions synth;
  synth.config_json = testing::tiny_config("qwen3_moe");
  synth.num_layers = 2;
  synth.num_tokens = 3;
  synth.max_shard_bytes = 100'000;
  synthesize_checkpoint(synth, directory / "in");
  testing::write_file(directory / "in" / "tokenizer.json", "{}");
  testing::write_file(directory / "in" / "training.bin", "no");
  std::int64_t calls = 0, last_done = 0;
  QuantizeCheckpointOptions options;
  options.scheme = parse_scheme("fp8_tensor_static");
  options.max_shard_bytes = 50'000;
  options.progress = [&](std::int64_t done, std::int64_t total) {
    ++calls;
    EXPECT_LE(done, total);
    EXPECT_GE(done, last_done);
    last_done = done;
  };
  EXPECT_GT(quantize_checkpoint(directory / "in", options, directory / "out"), 100'000);
  EXPECT_GT(calls, 4);
  const Checkpoint written = Checkpoint::open(directory / "out");
  EXPECT_EQ(written.moe_layers(), (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(name(written.load_layer(1).experts.scheme), "fp8_tensor_static");
  EXPECT_GT(written.files().size(), 4U);
  EXPECT_TRUE(std::filesystem::exists(directory / "out" / "tokenizer.json"));
  EXPECT_TRUE(std::filesystem::exists(directory / "out" / "input.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(directory / "out" / "training.bin"));
}

TEST(QuantizeCheckpointTest, Refusals) {
  const testing::TemporaryDirectory directory;
  const auto source = TinyCheckpoints::instance().source("qwen3_moe");
  const auto error = [&](const char* scheme, std::optional<CheckpointLayout> layout,
                         const std::filesystem::path& from) {
    QuantizeCheckpointOptions options;
    options.scheme = parse_scheme(scheme);
    options.layout = layout;
    std::string text = error_text([&] { quantize_checkpoint(from, options, directory / "out"); });
    EXPECT_FALSE(std::filesystem::exists(directory / "out")) << text;
    return text;
  };
  EXPECT_NE(error("bf16", {}, source).find("scheme: was bf16"), std::string::npos);
  EXPECT_NE(error("nvfp4", CheckpointLayout::kAwq, source)
                .find("layout: was awq; must be one that can hold nvfp4, such as modelopt"),
            std::string::npos);
  EXPECT_NE(error("mxfp4_w4a16", CheckpointLayout::kGptOss, source).find("layout: was gpt-oss"),
            std::string::npos);
  const auto quantized =
      TinyCheckpoints::instance().quantized("qwen3_moe", "fp8_block", CheckpointLayout::kFp8);
  EXPECT_NE(error("nvfp4", {}, quantized).find("layer 0: the experts are fp8_block already"),
            std::string::npos);
  // Only layers beside the experts are quantized, in a format that the result has no words for.
  const testing::TemporaryDirectory attention;
  auto tensors = tensors_of(source);
  tensors["model.layers.0.self_attn.q_proj.weight"] = Tensor::zeros({160, 160}, DType::kE4M3);
  tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = Tensor::zeros({2, 2}, DType::kF32);
  const std::map<std::string, TensorView> views(tensors.begin(), tensors.end());
  save_safetensors(attention / "model.safetensors", views);
  auto config = read_json(source / "config.json");
  const auto write_config = [&] {
    std::ofstream(attention / "config.json") << config.dump();
    std::filesystem::copy_file(source / "input.safetensors", attention / "input.safetensors",
                               std::filesystem::copy_options::overwrite_existing);
    return attention.path();
  };
  config["quantization_config"] = {{"quant_method", "fp8"},
                                   {"weight_block_size", {128, 128}},
                                   {"modules_to_not_convert", {"experts", "gate"}}};
  EXPECT_NE(
      error("nvfp4", {}, write_config())
          .find("config.quantization_config says that other layers than the routed experts are "
                "quantized already, such as that of model.layers.0.self_attn.q_proj.weight"),
      std::string::npos)
      << error("nvfp4", {}, write_config());
  config["quantization_config"]["modules_to_not_convert"] = {"experts", "gate", "self_attn"};
  EXPECT_EQ(error_text([&] {
              QuantizeCheckpointOptions options;
              options.scheme = parse_scheme("int4_g32");
              quantize_checkpoint(write_config(), options, attention / "out");
            }),
            "no error");
  std::filesystem::copy(source, directory / "in");
  std::filesystem::remove(directory / "in" / "input.safetensors");
  EXPECT_NE(error("nvfp4", {}, directory / "in").find("static activation scales"),
            std::string::npos);
}

}  // namespace fusedmoe::quantize_checkpoint_test
