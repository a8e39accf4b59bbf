// Settings of a config that differ from layer to layer: each layer is loaded with its own.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "tiny_checkpoint.h"

namespace fusedmoe::layer_settings_test {

using nlohmann::json;
using testing::error_text;
using testing::TemporaryDirectory;

void synthesize_three_layers(const std::string& family, const json& more,
                             const std::filesystem::path& path) {
  SynthOptions options;
  json config{{"model_type", family}, {"num_hidden_layers", 3},
              {"hidden_size", 64},    {"moe_intermediate_size", 32},
              {"num_experts", 8},     {"num_experts_per_tok", 2},
              {"n_group", 1},         {"topk_group", 1}};
  if (family == "deepseek_v4") config["n_shared_experts"] = 1;
  if (family == "bailing_hybrid") config["num_shared_experts"] = 1;
  if (family == "step3p7") config["share_expert_dim"] = 48;
  config.update(more);
  options.config_json = config.dump();
  options.num_layers = 3;
  options.num_tokens = 1;
  synthesize_checkpoint(options, path);
}

/// Three layers of a family, whose config then gets other keys.
struct ThreeLayers {
  explicit ThreeLayers(const std::string& family, const json& more = json::object()) {
    synthesize_three_layers(family, more, directory / "model");
  }

  void change(const json& keys) const {
    json config = json::parse(std::ifstream(directory / "model" / "config.json"));
    config.update(keys);
    std::ofstream(directory / "model" / "config.json") << config.dump();
  }
  Checkpoint open() const { return Checkpoint::open(directory / "model"); }

  TemporaryDirectory directory;
};

std::string activation_text(const ExpertWeights& weights) {
  std::string text(name(weights.activation));
  const float limit = resolve(weights.activation, weights.activation_params).limit;
  if (limit != std::numeric_limits<float>::infinity())
    text += " " + std::to_string(limit).substr(0, 1);
  return text;
}

struct LimitCase {
  const char* family;
  json keys;
  std::vector<std::string> routed, shared;  ///< of the three layers
};

TEST(LayerSettingsTest, LimitsOfTheActivation) {
  const std::vector<LimitCase> cases{
      {"bailing_hybrid",
       {{"expert_swiglu_limit_list", {0, nullptr, 4.0}},
        {"share_expert_swiglu_limit_list", {0, 5, 7.0}}},
       {"silu", "silu", "swiglustep 4"},
       {"silu", "swiglustep 5", "swiglustep 7"}},
      {"bailing_hybrid",
       {{"expert_swiglu_limit_list", nullptr}, {"share_expert_swiglu_limit_list", {0.0, 3}}},
       {"silu", "silu", "silu"},
       {"silu", "swiglustep 3", "silu"}},
      {"step3p7",
       {{"swiglu_limits", {7, 0, nullptr}}, {"swiglu_limits_shared", {0, 0, 2.0}}},
       {"swiglustep 7", "silu", "silu"},
       {"silu", "silu", "swiglustep 2"}},
      {"deepseek_v4",
       {{"swiglu_limit", {0, 8, 9}}},
       {"silu", "silu 8", "silu 9"},
       {"silu", "silu 8", "silu 9"}},
      {"deepseek_v4",
       {{"swiglu_limit", 6}},
       {"silu 6", "silu 6", "silu 6"},
       {"silu 6", "silu 6", "silu 6"}},
  };
  for (const LimitCase& test : cases) {
    const ThreeLayers model(test.family);
    model.change(test.keys);
    const Checkpoint checkpoint = model.open();
    for (std::size_t layer = 0; layer < 3; ++layer) {
      const LayerWeights weights = checkpoint.load_layer(static_cast<std::int64_t>(layer));
      EXPECT_EQ(activation_text(weights.experts), test.routed[layer]) << test.keys << layer;
      EXPECT_EQ(activation_text(weights.shared_experts->weights), test.shared[layer])
          << test.keys << layer;
      EXPECT_EQ(checkpoint.config(static_cast<std::int64_t>(layer)).activation,
                weights.experts.activation);
    }
  }
}

TEST(LayerSettingsTest, OtherLists) {
  const ThreeLayers model("hunyuan_v1_moe",
                          {{"intermediate_size", 32}, {"moe_topk", 2}, {"num_shared_expert", 1}});
  model.change({{"moe_topk", {1, 3, 2}}, {"n_group", false}, {"topk_group", false}});
  const Checkpoint checkpoint = model.open();
  for (const auto& [layer, topk] : {std::pair{0, 1}, std::pair{1, 3}, std::pair{2, 2}}) {
    EXPECT_EQ(checkpoint.load_layer(layer).router.topk, topk);
  }
  EXPECT_EQ(checkpoint.config().router.topk, 1);
  model.change({{"moe_topk", {1, 3}}});
  EXPECT_NE(error_text([&] { model.open().load_layer(2); })
                .find("config.moe_topk: was a list of 2 entries; must be a list with an entry for "
                      "layer 2"),
            std::string::npos);
  // Alone, a config says nothing about which layer is meant.
  EXPECT_THROW(parse_model_config(R"({"model_type": "hunyuan_v1_moe", "num_hidden_layers": 2,
      "hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "moe_topk": [1, 2]})"),
               Error);

  const ThreeLayers deepseek("deepseek_v3", {{"n_group", 2}, {"topk_group", 1}});
  deepseek.change(
      {{"routed_scaling_factor", {1, 2.5, 1}}, {"norm_topk_prob", {true, true, false}}});
  EXPECT_FLOAT_EQ(deepseek.open().load_layer(1).router.routed_scaling_factor, 2.5F);
  EXPECT_FALSE(deepseek.open().load_layer(2).router.renormalize);
  deepseek.change({{"n_group", false}, {"topk_group", false}});
  EXPECT_EQ(deepseek.open().load_layer(0).router.num_expert_group, 0);
}

// Layers of other sizes are quantized as they are, too.
TEST(LayerSettingsTest, LayersOfOtherWidthsAreQuantized) {
  const std::int64_t widths[] = {64, 32, 96};
  const ThreeLayers model("qwen3_moe");
  std::map<std::string, Tensor> tensors;
  for (int layer = 0; layer < 3; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const std::filesystem::path path = model.directory / std::to_string(layer);
    synthesize_three_layers("qwen3_moe", {{"moe_intermediate_size", widths[layer]}}, path);
    for (const auto& [name, tensor] : testing::tensors_of(path)) {
      if (name.starts_with(prefix)) tensors[name] = tensor;
    }
  }
  for (const auto& file : std::filesystem::directory_iterator(model.directory / "model")) {
    if (file.path().extension() == ".safetensors") std::filesystem::remove(file);
  }
  save_safetensors(model.directory / "model" / "model.safetensors",
                   {tensors.begin(), tensors.end()});
  model.change({{"moe_intermediate_size", widths}});
  QuantizeCheckpointOptions options;
  options.scheme = parse_scheme("mxfp8");
  quantize_checkpoint(model.directory / "model", options, model.directory / "quantized");
  const Checkpoint quantized = Checkpoint::open(model.directory / "quantized");
  for (int layer = 0; layer < 3; ++layer) {
    const ExpertWeights experts = quantized.load_layer(layer).experts;
    EXPECT_EQ(experts.intermediate, widths[layer]);
    EXPECT_EQ(name(experts.scheme), "mxfp8");
  }
  // Groups divide the widths of all layers.
  options.scheme = parse_scheme("int4_g64");
  options.layout = CheckpointLayout::kGptq;
  EXPECT_NE(error_text([&] {
              quantize_checkpoint(model.directory / "model", options, model.directory / "other");
            }).find("32 is no multiple of 64"),
            std::string::npos);
}

// What one family reads is refused in the others, in lists too, unless it changes nothing.
TEST(LayerSettingsTest, ListsThatMeanNothingHereAreRefused) {
  const auto error = [](const std::string& type, const json& keys) {
    json config{{"model_type", type},       {"num_hidden_layers", 2},
                {"hidden_size", 64},        {"moe_intermediate_size", 32},
                {"intermediate_size", 32},  {"num_experts", 8},
                {"num_experts_per_tok", 2}, {"n_group", 1},
                {"topk_group", 1}};
    config.update(keys);
    return error_text([&] { parse_model_config(config.dump()); });
  };
  for (const auto& [type, keys] : std::vector<std::pair<std::string, json>>{
           {"deepseek_v3", {{"expert_swiglu_limit_list", {0, 4}}}},
           {"qwen3_moe", {{"swiglu_limits", {nullptr, 7.0}}}},
           {"mixtral", {{"share_expert_swiglu_limit_list", {2, 2}}}},
           {"glm4_moe", {{"some_swiglu_clamp", {0, 1}}}},
           {"olmoe", {{"routed_scaling_factor", {1, 2}}}},
           {"gpt_oss", {{"swiglu_beta", 2}}}}) {
    EXPECT_NE(error(type, keys).find("config." + keys.items().begin().key()), std::string::npos)
        << type << keys << error(type, keys);
  }
  EXPECT_EQ(error("deepseek_v3", {{"expert_swiglu_limit_list", {0, 0.0, nullptr}},
                                  {"swiglu_anything", {false, 0}}}),
            "no error");
  EXPECT_EQ(error("qwen3_moe", {{"n_group", false}}), "no error");
  EXPECT_NE(error("bailing_hybrid", {{"score_function", "tanh"}}).find("score_function"),
            std::string::npos);
}

}  // namespace fusedmoe::layer_settings_test
