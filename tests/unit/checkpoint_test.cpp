// Checkpoints: the golden files, prefixes and layouts.
#include "fusedmoe/checkpoint.h"

#include <cmath>
#include <map>

#include "checkpoint_parts.h"
#include "fusedmoe/quant.h"
#include "gtest/gtest.h"
#include "temporary_directory.h"

namespace fusedmoe::checkpoint_test {

using testing::error_text;
using testing::golden;
using testing::Parts;
using testing::TemporaryDirectory;

// Element of a view of any strides, as fp32.
float at(const TensorView& view, std::int64_t row, std::int64_t col) {
  return load_f32(view.data(), view.dtype(), row * view.stride(0) + col * view.stride(1));
}
float at(const TensorView& view, std::int64_t i) {
  return load_f32(view.data(), view.dtype(), i * view.stride(0));
}

// Weight (out, in) of an expert matrix, decoded.
float weight(const WeightMatrix& matrix, std::int64_t out, std::int64_t in) {
  if (!matrix.scales) return at(matrix.values, out, in);
  const auto byte = matrix.values.as<const std::uint8_t>()[out * matrix.values.stride(0) + in / 2];
  const std::uint8_t code = in % 2 ? byte >> 4 : byte & 15;
  const auto scale =
      matrix.scales.as<const std::uint8_t>()[out * matrix.scales.stride(0) + in / 32];
  return e2m1_to_f32(code) * e8m0_to_f32(scale);
}

struct GoldenCase {
  std::string file;
  Family family;
  std::int64_t experts, topk, hidden, intermediate, shared;
};

class GoldenCheckpointTest : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(GoldenCheckpointTest, LoadsEveryTensor) {
  const GoldenCase& expected = GetParam();
  const Checkpoint checkpoint = Checkpoint::open(golden(expected.file));
  const ModelConfig& config = checkpoint.config();
  EXPECT_EQ(config.family, expected.family);
  ASSERT_EQ(checkpoint.moe_layers(), std::vector<std::int64_t>{0});

  const LayerWeights layer = checkpoint.load_layer(0);
  EXPECT_EQ(layer.router.num_experts, expected.experts);
  EXPECT_EQ(layer.router.topk, expected.topk);
  EXPECT_EQ(layer.router_weights.weight.shape(), Shape({expected.experts, expected.hidden}));
  EXPECT_EQ(layer.experts.num_experts(), expected.experts);
  EXPECT_EQ(layer.experts.hidden, expected.hidden);
  EXPECT_EQ(layer.experts.intermediate, expected.intermediate);
  EXPECT_EQ(layer.experts.has_bias(), expected.family == Family::named("gpt_oss"));
  EXPECT_EQ(layer.experts.scheme, config.scheme);
  ASSERT_EQ(layer.shared_experts.has_value(), expected.shared > 0);
  if (layer.shared_experts) {
    EXPECT_EQ(layer.shared_experts->weights.intermediate, expected.shared);
  }
  // Views into the mapping, not copies: the bytes add up to those of the file's tensors.
  std::int64_t stored = 0;
  for (const auto& tensor : checkpoint.layer_tensors(0)) {
    if (tensor.name.find("experts") != std::string::npos && tensor.name.find("shared") > 99) {
      stored += tensor.nbytes;
    }
    EXPECT_EQ(tensor.file, golden(expected.file));
  }
  if (expected.family != Family::named("granitemoe")) {  // whose names do not say experts
    EXPECT_EQ(layer.experts.nbytes(), stored);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, GoldenCheckpointTest,
    ::testing::Values(GoldenCase{"gpt_oss", Family::named("gpt_oss"), 8, 4, 256, 128, 0},
                      GoldenCase{"gpt_oss_odd", Family::named("gpt_oss"), 16, 4, 360, 360, 0},
                      GoldenCase{"gpt_oss_mxfp4", Family::named("gpt_oss"), 8, 4, 256, 128, 0},
                      GoldenCase{"gpt_oss_mxfp4_odd", Family::named("gpt_oss"), 10, 4, 288, 160, 0},
                      GoldenCase{"mixtral", Family::named("mixtral"), 8, 2, 256, 96, 0},
                      GoldenCase{"qwen3_moe_norm", Family::named("qwen3_moe"), 16, 4, 128, 96, 0},
                      GoldenCase{"qwen3_moe_nonorm", Family::named("qwen3_moe"), 32, 6, 96, 48, 0},
                      GoldenCase{"deepseek_v3", Family::named("deepseek_v3"), 32, 6, 128, 48, 96},
                      GoldenCase{"llama4", Family::named("llama4"), 8, 1, 256, 96, 96},
                      GoldenCase{"olmoe", Family::named("olmoe"), 16, 4, 128, 64, 0},
                      GoldenCase{"granitemoe", Family::named("granitemoe"), 10, 4, 96, 64, 0},
                      GoldenCase{"glm4_moe", Family::named("glm4_moe"), 8, 2, 96, 48, 48}),
    [](const auto& info) { return info.param.file; });

// transformers' own fused copies fix order and transposition: (E, 2I, H) gate then up, (E, H, I).
TEST(CheckpointTest, MatchesTheInMemoryLayout) {
  for (const char* name : {"mixtral", "qwen3_moe_norm", "qwen3_moe_nonorm", "deepseek_v3", "olmoe",
                           "granitemoe", "glm4_moe"}) {
    const SafetensorsFile file = SafetensorsFile::open(golden(name));
    const LayerWeights layer = Checkpoint::open(golden(name)).load_layer(0);
    const std::int64_t inner = layer.experts.intermediate, hidden = layer.experts.hidden;
    const std::string block = std::string(name) == "granitemoe" ? "block_sparse_moe" : "mlp";
    const Tensor gate_up = file.tensor("inmemory." + block + ".experts.gate_up_proj");
    const Tensor down = file.tensor("inmemory." + block + ".experts.down_proj");
    for (std::int64_t e = 0; e < layer.experts.num_experts(); ++e) {
      const ExpertMatrices& expert = layer.experts.experts[static_cast<std::size_t>(e)];
      const TensorView w13 = gate_up.select(0, e), w2 = down.select(0, e);
      for (std::int64_t i = 0; i < inner; ++i) {
        for (std::int64_t h = 0; h < hidden; ++h) {
          ASSERT_EQ(at(expert.gate.values, i, h), at(w13, i, h)) << name;
          ASSERT_EQ(at(expert.up.values, i, h), at(w13, inner + i, h)) << name;
          ASSERT_EQ(at(expert.down.values, h, i), at(w2, h, i)) << name;
        }
      }
    }
  }
}

// (E, H, 2I), gate in the first half of the columns.
TEST(CheckpointTest, Llama4IsTransposedInHalves) {
  const SafetensorsFile file = SafetensorsFile::open(golden("llama4"));
  const LayerWeights layer = Checkpoint::open(golden("llama4")).load_layer(0);
  const TensorView gate_up = file.tensor("feed_forward.experts.gate_up_proj").select(0, 7);
  const TensorView down = file.tensor("feed_forward.experts.down_proj").select(0, 7);
  const ExpertMatrices& expert = layer.experts.experts[7];
  for (std::int64_t i = 0; i < 96; ++i) {
    for (std::int64_t h = 0; h < 256; ++h) {
      ASSERT_EQ(at(expert.gate.values, i, h), at(gate_up, h, i));
      ASSERT_EQ(at(expert.up.values, i, h), at(gate_up, h, 96 + i));
      ASSERT_EQ(at(expert.down.values, h, i), at(down, i, h));
    }
  }
  const ExpertMatrices& shared = layer.shared_experts->weights.experts[0];
  const Tensor shared_up = file.tensor("feed_forward.shared_expert.up_proj.weight");
  EXPECT_EQ(at(shared.up.values, 5, 6), at(shared_up, 5, 6));
}

// The stored gpt-oss bf16 layout is (E, H, 2I), gate in even columns.
TEST(CheckpointTest, GptOssIsTransposedAndInterleaved) {
  const SafetensorsFile file = SafetensorsFile::open(golden("gpt_oss_odd"));
  const LayerWeights layer = Checkpoint::open(golden("gpt_oss_odd")).load_layer(0);
  const TensorView gate_up = file.tensor("mlp.experts.gate_up_proj").select(0, 3);
  const TensorView down = file.tensor("mlp.experts.down_proj").select(0, 3);
  const TensorView bias = file.tensor("mlp.experts.gate_up_proj_bias").select(0, 3);
  const ExpertMatrices& expert = layer.experts.experts[3];
  for (std::int64_t i = 0; i < 360; ++i) {
    ASSERT_EQ(at(expert.gate.bias, i), at(bias, 2 * i));
    ASSERT_EQ(at(expert.up.bias, i), at(bias, 2 * i + 1));
    for (std::int64_t h = 0; h < 360; ++h) {
      ASSERT_EQ(at(expert.gate.values, i, h), at(gate_up, h, 2 * i));
      ASSERT_EQ(at(expert.up.values, i, h), at(gate_up, h, 2 * i + 1));
      ASSERT_EQ(at(expert.down.values, h, i), at(down, i, h));
    }
  }
}

TEST(CheckpointTest, Mxfp4MatchesTransformersDequantization) {
  for (const char* name : {"gpt_oss_mxfp4", "gpt_oss_mxfp4_odd"}) {
    const SafetensorsFile file = SafetensorsFile::open(golden(name));
    const LayerWeights layer = Checkpoint::open(golden(name)).load_layer(0);
    EXPECT_EQ(layer.experts.scheme, schemes::mxfp4_w4a16());
    const Tensor gate_up = file.tensor("check.hf_dequant.gate_up_proj.expert0");  // (H, 2I)
    const Tensor down = file.tensor("check.hf_dequant.down_proj.expert0");        // (I, H)
    const ExpertMatrices& expert = layer.experts.experts[0];
    for (std::int64_t i = 0; i < layer.experts.intermediate; ++i) {
      for (std::int64_t h = 0; h < layer.experts.hidden; ++h) {
        ASSERT_EQ(weight(expert.gate, i, h), at(gate_up, h, 2 * i));
        ASSERT_EQ(weight(expert.up, i, h), at(gate_up, h, 2 * i + 1));
        ASSERT_EQ(weight(expert.down, h, i), at(down, i, h));
      }
    }
  }
}

TEST(CheckpointTest, RouterSettingsOfTheFamilies) {
  const auto router = [](const char* name) {
    return Checkpoint::open(golden(name)).config().router;
  };
  EXPECT_EQ(router("gpt_oss").scoring, ScoringFunc::kTopkSoftmax);
  EXPECT_EQ(router("granitemoe").scoring, ScoringFunc::kTopkSoftmax);
  EXPECT_TRUE(router("mixtral").renormalize);
  EXPECT_TRUE(router("qwen3_moe_norm").renormalize);
  EXPECT_FALSE(router("qwen3_moe_nonorm").renormalize);
  EXPECT_FALSE(router("olmoe").renormalize);
  const RouterConfig deepseek = router("deepseek_v3");
  EXPECT_EQ(deepseek.scoring, ScoringFunc::kSigmoid);
  EXPECT_TRUE(deepseek.renormalize);
  EXPECT_EQ(deepseek.num_expert_group, 8);
  EXPECT_EQ(deepseek.topk_group, 4);
  EXPECT_FLOAT_EQ(deepseek.routed_scaling_factor, 2.5f);
  EXPECT_FLOAT_EQ(router("glm4_moe").routed_scaling_factor, 1.5f);
  EXPECT_EQ(router("llama4").scoring, ScoringFunc::kTopkSigmoid);
  EXPECT_TRUE(router("llama4").apply_router_weight_on_input);
  const LayerWeights layer = Checkpoint::open(golden("deepseek_v3")).load_layer(0);
  EXPECT_EQ(layer.router_weights.score_correction_bias.shape(), Shape({32}));
  EXPECT_FALSE(layer.router_weights.bias.defined());
  EXPECT_TRUE(Checkpoint::open(golden("gpt_oss")).load_layer(0).router_weights.bias.defined());
}

TEST(CheckpointTest, NamesWithPublishedPrefixes) {
  const TemporaryDirectory directory;
  const Parts parts("qwen3_moe_norm");
  for (const char* prefix : {"model.layers.17.", "language_model.model.layers.17.",
                             "model.language_model.layers.17.", "layers.17."}) {
    parts.save(directory / "x.safetensors", prefix);
    const Checkpoint checkpoint = Checkpoint::open(directory / "x.safetensors");
    EXPECT_EQ(checkpoint.moe_layers(), std::vector<std::int64_t>{17}) << prefix;
    EXPECT_EQ(checkpoint.load_layer(17).experts.num_experts(), 16);
    EXPECT_NE(error_text([&] { checkpoint.load_layer(0); }).find("which are: 17"),
              std::string::npos);
  }
  for (const char* prefix : {"my_model.layers.1.", "xmodel.layers.1.", "model.layers.01.",
                             "model.layers.1x.", "model.layers..", "model.layers.1.attention."}) {
    parts.save(directory / "x.safetensors", prefix);
    EXPECT_TRUE(Checkpoint::open(directory / "x.safetensors").moe_layers().empty()) << prefix;
  }
}

TEST(CheckpointTest, DenseLayersAreNotMoeLayers) {
  const TemporaryDirectory directory;
  const Parts parts("deepseek_v3");
  auto tensors = parts.with_prefix("model.layers.1.");
  const TensorView any = parts.tensors.begin()->second;
  for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
    tensors[std::string("model.layers.0.mlp.") + name + ".weight"] = any;
  }
  tensors["model.embed_tokens.weight"] = any;
  save_safetensors(directory / "x.safetensors", tensors, {{"config", parts.config}});
  const Checkpoint checkpoint = Checkpoint::open(directory / "x.safetensors");
  EXPECT_EQ(checkpoint.moe_layers(), std::vector<std::int64_t>{1});
  EXPECT_EQ(checkpoint.load_layer(1).experts.num_experts(), 32);
}

// transformers v5 can save the fused 3-D tensors it computes with.
TEST(CheckpointTest, FusedLayoutEqualsPerExpertLayout) {
  for (const char* name : {"qwen3_moe_norm", "mixtral", "deepseek_v3", "olmoe", "glm4_moe"}) {
    const TemporaryDirectory directory;
    const Parts parts(name);
    const bool mixtral = std::string(name) == "mixtral";
    std::map<std::string, TensorView> fused;
    for (const auto& [tensor_name, view] : parts.tensors) {
      if (tensor_name.find(".experts.") != std::string::npos) continue;
      fused[mixtral ? "mlp.gate.weight" : tensor_name] = view;
    }
    for (const char* projection : {"gate_up_proj", "down_proj"}) {
      fused[std::string("mlp.experts.") + projection] =
          parts.file.tensor(std::string("inmemory.mlp.experts.") + projection);
    }
    save_safetensors(directory / "x.safetensors", fused, {{"config", parts.config}});
    const LayerWeights expected = Checkpoint::open(golden(name)).load_layer(0);
    const LayerWeights actual = Checkpoint::open(directory / "x.safetensors").load_layer(0);
    ASSERT_EQ(actual.experts.num_experts(), expected.experts.num_experts());
    for (std::size_t e = 0; e < expected.experts.experts.size(); ++e) {
      const ExpertMatrices &a = actual.experts.experts[e], &b = expected.experts.experts[e];
      for (std::int64_t i = 0; i < expected.experts.intermediate; ++i) {
        for (std::int64_t h = 0; h < expected.experts.hidden; ++h) {
          ASSERT_EQ(at(a.gate.values, i, h), at(b.gate.values, i, h));
          ASSERT_EQ(at(a.up.values, i, h), at(b.up.values, i, h));
          ASSERT_EQ(at(a.down.values, h, i), at(b.down.values, h, i));
        }
      }
    }
  }
}

TEST(CheckpointTest, WeightsOutliveTheCheckpoint) {
  LayerWeights layer;
  {
    const Checkpoint checkpoint = Checkpoint::open(golden("granitemoe"));
    layer = checkpoint.load_layer(0);
  }
  layer.experts.validate();
  float sum = 0;
  for (const ExpertMatrices& expert : layer.experts.experts) sum += at(expert.down.values, 1, 2);
  EXPECT_TRUE(std::isfinite(sum));
}

}  // namespace fusedmoe::checkpoint_test
