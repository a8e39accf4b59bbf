// Synthetic checkpoints: every family round-trips through Checkpoint; values have the right scale.
#include <cmath>
#include <cstring>
#include <map>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/safetensors.h"
#include "fusedmoe/tensor.h"
#include "gtest/gtest.h"
#include "temporary_directory.h"
#include "tools/synth.h"

namespace fusedmoe::synth_test {

using testing::TemporaryDirectory;
using testing::write_file;

// Keys that all families share; E 6, top-k 1, H 64, I 32.
std::string config(const std::string& type, const std::string& more) {
  return R"({"model_type": ")" + type +
         R"(", "num_hidden_layers": 40, "hidden_size": 64, "num_experts_per_tok": 1, )" + more +
         "}";
}

struct FamilyCase {
  std::string name;
  std::string config_json;
  std::string router_name;
  std::string expert_name;  ///< one published tensor of the experts
  Shape expert_shape;
};

std::vector<FamilyCase> families() {
  const std::string grouped =
      R"("n_routed_experts": 6, "moe_intermediate_size": 32, "n_shared_experts": 2,
         "first_k_dense_replace": 3, "n_group": 3, "topk_group": 2)";
  return {
      {"gpt_oss",
       config("gpt_oss", R"("num_local_experts": 6, "intermediate_size": 32)"),
       "model.layers.1.mlp.router.weight",
       "model.layers.1.mlp.experts.gate_up_proj",
       {6, 64, 64}},
      {"gpt_oss_mxfp4",
       config("gpt_oss", R"("num_local_experts": 6, "intermediate_size": 32,
                            "quantization_config": {"quant_method": "mxfp4"})"),
       "model.layers.1.mlp.router.weight",
       "model.layers.1.mlp.experts.gate_up_proj_blocks",
       {6, 64, 2, 16}},
      {"mixtral",
       config("mixtral", R"("num_local_experts": 6, "intermediate_size": 32)"),
       "model.layers.1.block_sparse_moe.gate.weight",
       "model.layers.1.block_sparse_moe.experts.5.w3.weight",
       {32, 64}},
      {"qwen2_moe",
       config("qwen2_moe", R"("num_experts": 6, "moe_intermediate_size": 32,
                              "shared_expert_intermediate_size": 96)"),
       "model.layers.1.mlp.gate.weight",
       "model.layers.1.mlp.experts.5.up_proj.weight",
       {32, 64}},
      {"qwen3_moe",
       config("qwen3_moe", R"("num_experts": 6, "moe_intermediate_size": 32)"),
       "model.layers.1.mlp.gate.weight",
       "model.layers.1.mlp.experts.5.up_proj.weight",
       {32, 64}},
      {"deepseek_v2",
       config("deepseek_v2", grouped + R"(, "topk_method": "group_limited_greedy")"),
       "model.layers.1.mlp.gate.weight",
       "model.layers.1.mlp.experts.5.up_proj.weight",
       {32, 64}},
      {"deepseek_v3",
       config("deepseek_v3", grouped + R"(, "quantization_config": {"quant_method": "fp8"})"),
       "model.layers.1.mlp.gate.weight",
       "model.layers.1.mlp.experts.5.up_proj.weight",
       {32, 64}},
      {"llama4",
       R"({"model_type": "llama4", "text_config": )" +
           config("llama4_text", R"("num_local_experts": 6, "intermediate_size": 32)") + "}",
       "language_model.model.layers.1.feed_forward.router.weight",
       "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
       {6, 64, 64}},
      {"olmoe",
       config("olmoe", R"("num_experts": 6, "intermediate_size": 32)"),
       "model.layers.1.mlp.gate.weight",
       "model.layers.1.mlp.experts.5.up_proj.weight",
       {32, 64}},
      {"granitemoe",
       config("granitemoe", R"("num_local_experts": 6, "intermediate_size": 32)"),
       "model.layers.1.block_sparse_moe.router.layer.weight",
       "model.layers.1.block_sparse_moe.input_linear.weight",
       {6, 64, 64}},
      {"glm4_moe",
       config("glm4_moe", grouped),
       "model.layers.1.mlp.gate.weight",
       "model.layers.1.mlp.experts.5.up_proj.weight",
       {32, 64}},
  };
}

std::uintmax_t directory_bytes(const std::filesystem::path& directory) {
  std::uintmax_t total = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    total += entry.file_size();
  }
  return total;
}

class SynthFamilyTest : public ::testing::TestWithParam<FamilyCase> {};

TEST_P(SynthFamilyTest, RoundTripsThroughCheckpoint) {
  const TemporaryDirectory directory;
  SynthOptions options;
  options.config_json = GetParam().config_json;
  options.num_layers = 2;
  options.num_tokens = 5;
  std::int64_t done = 0, total = 0;
  options.progress = [&](std::int64_t d, std::int64_t t) {
    EXPECT_GE(d, done);
    done = d;
    total = t;
  };
  const std::int64_t written = synthesize_checkpoint(options, directory / "model");
  EXPECT_EQ(static_cast<std::uintmax_t>(written), directory_bytes(directory / "model"));
  EXPECT_EQ(done, total);

  const Checkpoint checkpoint = Checkpoint::open(directory / "model");
  EXPECT_EQ(checkpoint.moe_layers(), (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(checkpoint.config().num_layers, 2);
  EXPECT_EQ(checkpoint.config().scheme, GetParam().name == "gpt_oss_mxfp4"
                                            ? schemes::mxfp4_w4a16()
                                            : schemes::unquantized(DType::kBF16));
  for (std::int64_t number : {0, 1}) {
    const LayerWeights layer = checkpoint.load_layer(number);
    EXPECT_EQ(layer.experts.num_experts(), 6);
    EXPECT_EQ(layer.experts.hidden, 64);
    EXPECT_EQ(layer.experts.intermediate, 32);
  }
  const SafetensorsFile weights = SafetensorsFile::open(directory / "model/model.safetensors");
  EXPECT_EQ(weights.tensor(GetParam().router_name).shape(), Shape({6, 64}));
  EXPECT_EQ(weights.tensor(GetParam().expert_name).shape(), GetParam().expert_shape);
  const Tensor input =
      SafetensorsFile::open(directory / "model/input.safetensors").tensor("hidden_states");
  EXPECT_EQ(input.shape(), Shape({5, 64}));
  EXPECT_EQ(input.dtype(), DType::kBF16);
}

INSTANTIATE_TEST_SUITE_P(All, SynthFamilyTest, ::testing::ValuesIn(families()),
                         [](const auto& info) { return info.param.name; });

class SynthTest : public ::testing::Test {
 protected:
  const TemporaryDirectory directory;
};

TEST_F(SynthTest, SharedExpertsAndBiases) {
  std::map<std::string, LayerWeights> layers;
  for (const FamilyCase& family : families()) {
    synthesize_checkpoint({.config_json = family.config_json, .num_tokens = 1, .progress = {}},
                          directory / family.name);
    layers[family.name] = Checkpoint::open(directory / family.name).load_layer(0);
  }
  EXPECT_EQ(layers["qwen2_moe"].shared_experts->weights.intermediate, 96);
  EXPECT_EQ(layers["qwen2_moe"].shared_experts->gate.shape(), Shape({1, 64}));
  EXPECT_EQ(layers["deepseek_v2"].shared_experts->weights.intermediate, 64);
  EXPECT_FALSE(layers["deepseek_v2"].shared_experts->gate.defined());
  EXPECT_FALSE(layers["deepseek_v2"].router_weights.score_correction_bias.defined());
  EXPECT_EQ(layers["deepseek_v2"].router.num_expert_group, 3);
  EXPECT_EQ(layers["deepseek_v2"].router.scoring, ScoringFunc::kSoftmax);
  EXPECT_EQ(layers["deepseek_v3"].router_weights.score_correction_bias.dtype(), DType::kF32);
  EXPECT_EQ(layers["llama4"].shared_experts->weights.intermediate, 32);
  EXPECT_TRUE(layers["gpt_oss_mxfp4"].experts.has_bias());
  EXPECT_FALSE(layers["qwen3_moe"].shared_experts.has_value());
}

TEST_F(SynthTest, ShardsWithIndex) {
  SynthOptions options;
  options.config_json = families()[2].config_json;
  options.num_layers = 3;
  options.max_shard_bytes = 30'000;  // a layer has 74 KB, an expert matrix 4 KB
  synthesize_checkpoint(options, directory / "model");
  std::size_t shards = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory / "model")) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("model-")) continue;
    ++shards;
    EXPECT_NE(name.find("-of-00008.safetensors"), std::string::npos) << name;
    std::int64_t bytes = 0;
    const SafetensorsFile file = SafetensorsFile::open(entry.path());
    for (const auto& [tensor_name, tensor] : file.tensors()) bytes += tensor.nbytes();
    EXPECT_LE(bytes, options.max_shard_bytes);
  }
  EXPECT_EQ(shards, 8u);
  const Checkpoint checkpoint = Checkpoint::open(directory / "model");
  EXPECT_EQ(checkpoint.moe_layers().size(), 3u);
  EXPECT_EQ(checkpoint.load_layer(2).experts.num_experts(), 6);
}

// Sample deviation of a bf16 tensor.
double deviation(const Tensor& tensor) {
  double sum = 0, squares = 0;
  const auto count = static_cast<double>(tensor.numel());
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    const double value = load_f32(tensor.data(), tensor.dtype(), i);
    sum += value;
    squares += value * value;
  }
  return std::sqrt(squares / count - sum * sum / (count * count));
}

TEST_F(SynthTest, ValuesHaveUnitGain) {
  const std::string json =
      R"({"model_type": "olmoe", "num_hidden_layers": 1, "hidden_size": 256, "num_experts": 4,
          "num_experts_per_tok": 2, "intermediate_size": 1024})";
  synthesize_checkpoint({.config_json = json, .num_tokens = 256, .progress = {}},
                        directory / "model");
  const SafetensorsFile file = SafetensorsFile::open(directory / "model/model.safetensors");
  // 2^18 samples: the deviation of the sample deviation is 0.14 %; rounding to bf16 adds less.
  EXPECT_NEAR(deviation(file.tensor("model.layers.0.mlp.experts.0.up_proj.weight")), 1 / 16.0,
              0.01 / 16);
  EXPECT_NEAR(deviation(file.tensor("model.layers.0.mlp.experts.0.down_proj.weight")), 1 / 32.0,
              0.01 / 32);
  // 2^16 samples: 0.28 %.
  EXPECT_NEAR(
      deviation(
          SafetensorsFile::open(directory / "model/input.safetensors").tensor("hidden_states")),
      1, 0.02);
  // 2^10 samples: 2.2 %.
  EXPECT_NEAR(deviation(file.tensor("model.layers.0.mlp.gate.weight")), 1.5 / 16, 0.15 / 16);
}

TEST_F(SynthTest, Mxfp4ValuesHaveUnitGain) {
  const std::string json =
      R"({"model_type": "gpt_oss", "num_hidden_layers": 1, "hidden_size": 256,
          "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64,
          "quantization_config": {"quant_method": "mxfp4"}})";
  synthesize_checkpoint({.config_json = json, .progress = {}}, directory / "model");
  const LayerWeights layer = Checkpoint::open(directory / "model").load_layer(0);
  double squares = 0;
  const WeightMatrix& gate = layer.experts.experts[2].gate;
  for (std::int64_t i = 0; i < 64; ++i) {
    for (std::int64_t h = 0; h < 256; ++h) {
      const int byte = gate.values.as<const std::uint8_t>()[i * gate.values.stride(0) + h / 2];
      const double value =
          e2m1_to_f32(static_cast<std::uint8_t>(h % 2 ? byte >> 4 : byte & 15)) *
          e8m0_to_f32(gate.scales.as<const std::uint8_t>()[i * gate.scales.stride(0) + h / 32]);
      squares += value * value;
    }
  }
  // Scales are powers of two, so the gain is 1 within sqrt(2), and a few percent of sampling.
  const double gain = std::sqrt(squares / (64 * 256)) * std::sqrt(256);
  EXPECT_GT(gain, 0.65);
  EXPECT_LT(gain, 1.5);
}

std::string file_bytes(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST_F(SynthTest, SeedDecidesTheBytes) {
  SynthOptions options;
  options.config_json = families()[0].config_json;
  synthesize_checkpoint(options, directory / "a");
  synthesize_checkpoint(options, directory / "b");
  options.seed = 1;
  synthesize_checkpoint(options, directory / "c");
  const auto weights = [&](const char* name) {
    return file_bytes(directory / name / "model.safetensors");
  };
  EXPECT_EQ(weights("a"), weights("b"));
  EXPECT_NE(weights("a"), weights("c"));
}

TEST_F(SynthTest, TargetMustBeNewOrEmpty) {
  SynthOptions options;
  options.config_json = families()[0].config_json;
  std::filesystem::create_directory(directory / "empty");
  EXPECT_NO_THROW(synthesize_checkpoint(options, (directory / "empty").string() + "/"));
  EXPECT_THROW(synthesize_checkpoint(options, directory / "empty"), Error);
  write_file(directory / "file", "x");
  EXPECT_THROW(synthesize_checkpoint(options, directory / "file"), Error);
  EXPECT_EQ(file_bytes(directory / "file"), "x");
}

TEST_F(SynthTest, FailureLeavesNothing) {
  SynthOptions options;
  options.config_json = families()[0].config_json;
  options.progress = [](std::int64_t, std::int64_t) { throw Error("stopped", "here", "there"); };
  EXPECT_THROW(synthesize_checkpoint(options, directory / "model"), Error);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST_F(SynthTest, RefusesBadOptions) {
  SynthOptions options;
  options.config_json = families()[0].config_json;
  const auto run = [&] { synthesize_checkpoint(options, directory / "model"); };
  options.num_layers = 0;
  EXPECT_THROW(run(), Error);
  options.num_layers = 1;
  options.num_tokens = -1;
  EXPECT_THROW(run(), Error);
  options.num_tokens = 1;
  options.config_json = "{}";
  EXPECT_THROW(run(), Error);
  // 16384 experts of 2^18 x 2^18 fit on no disk.
  options.config_json =
      R"({"model_type": "olmoe", "num_hidden_layers": 1, "hidden_size": 262144,
          "num_experts": 16384, "num_experts_per_tok": 2, "intermediate_size": 262144})";
  EXPECT_THROW(run(), Error);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
}

TEST_F(SynthTest, PresetsParse) {
  const std::map<std::string, std::array<std::int64_t, 5>> expected{
      // experts, top-k, hidden, intermediate, layers
      {"gpt-oss-20b", {32, 4, 2880, 2880, 24}},      {"gpt-oss-120b", {128, 4, 2880, 2880, 36}},
      {"mixtral-8x7b", {8, 2, 4096, 14336, 32}},     {"qwen3-30b-a3b", {128, 8, 2048, 768, 48}},
      {"qwen3-235b-a22b", {128, 8, 4096, 1536, 94}}, {"deepseek-v3", {256, 8, 7168, 2048, 61}},
      {"llama4-scout", {16, 1, 5120, 8192, 48}}};
  EXPECT_EQ(model_preset_names().size(), expected.size());
  for (const auto& [name, sizes] : expected) {
    const ModelConfig model = parse_model_config(model_preset(name));
    const std::array<std::int64_t, 5> actual{model.router.num_experts, model.router.topk,
                                             model.hidden, model.intermediate, model.num_layers};
    EXPECT_EQ(actual, sizes) << name;
    const MoeConfig moe = moe_config(model, DType::kBF16);
    EXPECT_EQ(moe.num_local_experts, sizes[0]);
    EXPECT_EQ(moe.scheme, name.starts_with("gpt") ? schemes::mxfp4_w4a16()
                                                  : schemes::unquantized(DType::kBF16));
  }
  EXPECT_THROW(model_preset("gpt-5"), Error);
}

}  // namespace fusedmoe::synth_test
