// Damaged quantization configs of checkpoints whose layers differ: an Error, or layers with the
// numbers that were stored, unless the config says another format for them.
// FUSEDMOE_MUTATIONS is the number of damaged configs (default: a few hundred).
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "fusedmoe/quant.h"
#include "gtest/gtest.h"
#include "layered_checkpoint.h"
#include "testing/cases.h"

namespace fusedmoe::config_mutations_test {

using testing::File;
using testing::Layers;
using testing::Random;
using enum CheckpointLayout;

const std::vector<Layers>& layers() {
  static const std::vector<Layers> table{
      {"Gptq",
       "{" FUSEDMOE_GPTQ R"("desc_act": false, "dynamic": {"-:.*layers\\.2\\..*": {},
           "+:.*\\.1\\.mlp.*": {"bits": 8}, ".*down_proj": {"sym": false}}})",
       kGptq,
       {"int4_g32+int4_g32_zp", "int8_g32", "bf16"},
       "qwen3_moe"},
      {"AutoRound",
       "{" FUSEDMOE_ROUND R"("extra_config": {"model.layers.1.mlp.experts": {"bits": 16},
           ".*layers.0.*down_proj": {"bits": 8, "data_type": "int"}}})",
       kGptq,
       {"int4_g32+int8_g32", "bf16"},
       "qwen3_moe"},
      {"Awq",
       "{" FUSEDMOE_AWQ R"("version": "gemm", "modules_to_not_convert": ["layers.1.", "gate"]})",
       kAwq,
       {"int4_g32_zp", "bf16"},
       "qwen3_moe"},
      {"Fp8",
       "{" FUSEDMOE_FP8 R"("activation_scheme": "dynamic", "ignored_layers":
           ["model.layers.0.mlp.experts", "re:.*layers.3.*"]})",
       kFp8,
       {"bf16", "fp8_block"},
       "qwen3_moe"},
      {"ModelOpt",
       R"({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["mtp*"],
           "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4",
           "group_size": 16}, "model.layers.1.mlp.experts.*": {"quant_algo": "FP8_PB_WO"}}})",
       kModelOpt,
       {"nvfp4_w4a16", "fp8_block_w8a16"},
       "qwen3_moe"},
      {"CompressedTensors",
       "{" FUSEDMOE_CT R"("ignore": ["lm_head", "re:.*mlp.gate$"], "config_groups": {
           "group_0": {"targets": ["re:.*layers\\.0\\..*"],)" FUSEDMOE_CHANNEL "," FUSEDMOE_TOKEN
       R"(}, "group_1": {"targets": ["Linear"],)" FUSEDMOE_INT4 "}}}",
       kCompressedTensors,
       {"fp8_channel_token", "int4_g32"},
       "qwen3_moe"}};
  return table;
}

/// Bits of every weight.
std::vector<float> decode(const LayerWeights& layer) {
  std::vector<float> values;
  const ExpertWeights& weights = layer.experts;
  const auto add = [&](const WeightMatrix& matrix, const QuantKey& key, std::int64_t in) {
    const Tensor decoded = dequantize_weights(matrix, key, in);
    values.insert(values.end(), decoded.as<const float>(),
                  decoded.as<const float>() + decoded.numel());
  };
  for (const ExpertMatrices& expert : weights.experts) {
    add(expert.gate, weights.scheme.weights, weights.hidden);
    add(expert.up, weights.scheme.weights, weights.hidden);
    add(expert.down, weights.scheme.down_weights(), weights.intermediate);
  }
  return values;
}

/// A checkpoint in memory: its header without the config, and what follows.
struct Stored {
  explicit Stored(const Layers& wanted) : schemes(wanted.schemes) {
    File file;
    fill(wanted, file);
    config = nlohmann::json::parse(file.text());
    file.open();
    std::ifstream stream(file.directory / "x.safetensors", std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    header = nlohmann::json::parse(bytes.substr(8, length));
    data = bytes.substr(8 + length);
    const std::string whole = with(config.dump());
    const Checkpoint checkpoint = Checkpoint::parse(whole.data(), whole.size(), wanted.name);
    layout = checkpoint.config().layout;
    for (std::size_t i = 0; i < schemes.size(); ++i) {
      values.push_back(decode(checkpoint.load_layer(static_cast<std::int64_t>(i))));
    }
  }

  std::string with(const std::string& text) const {
    nlohmann::json changed = header;
    changed["__metadata__"]["config"] = text;
    std::string json = changed.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    while (json.size() % 8 != 0) json += ' ';
    const std::uint64_t length = json.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    return bytes + json + data;
  }

  nlohmann::json config, header;
  std::string data;
  CheckpointLayout layout;
  std::vector<const char*> schemes;
  std::vector<std::vector<float>> values;
};

/// Every value of the tree, and what holds it.
struct Place {
  nlohmann::json* parent;
  std::string key;
  std::size_t index = 0;
};

void collect(nlohmann::json& node, std::vector<Place>& places) {
  if (node.is_object()) {
    for (auto& [key, value] : node.items()) {
      places.push_back({&node, key});
      collect(value, places);
    }
  } else if (node.is_array()) {
    for (std::size_t i = 0; i < node.size(); ++i) {
      places.push_back({&node, {}, i});
      collect(node[i], places);
    }
  }
}

nlohmann::json random_value(Random& random) {
  static const std::vector<nlohmann::json> values{nullptr,
                                                  true,
                                                  false,
                                                  0,
                                                  1,
                                                  4,
                                                  8,
                                                  16,
                                                  32,
                                                  128,
                                                  -1,
                                                  1e9,
                                                  "int",
                                                  "float",
                                                  "NVFP4",
                                                  "FP8",
                                                  "group",
                                                  "channel",
                                                  "weight",
                                                  "gptq_v2",
                                                  "Linear",
                                                  "re:.*",
                                                  "re:(",
                                                  ".*experts.*",
                                                  "model.layers.0.mlp",
                                                  nlohmann::json::array(),
                                                  nlohmann::json::object(),
                                                  nlohmann::json::array({"layers.1"}),
                                                  nlohmann::json::array({128, 128})};
  return values[random.below(values.size())];
}

std::string damaged_text(std::string text, Random& random) {
  constexpr std::string_view kCharacters = ".*\\()[]{}|?+^$-:0123456789abexp_";
  if (text.empty()) return ".*";
  const std::size_t at = random.below(text.size());
  const char c = kCharacters[random.below(kCharacters.size())];
  switch (random.below(3)) {
    case 0:
      text[at] = c;
      break;
    case 1:
      text.insert(at, 1, c);
      break;
    default:
      text.erase(at, 1 + random.below(4));
  }
  return text;
}

void damage(nlohmann::json& quantization, Random& random) {
  std::vector<Place> places;
  collect(quantization, places);
  if (places.empty()) return;
  const Place& place = places[random.below(places.size())];
  const bool in_object = place.parent->is_object();
  nlohmann::json& value = in_object ? (*place.parent)[place.key] : (*place.parent)[place.index];
  switch (random.below(6)) {
    case 0:
      if (in_object) {
        place.parent->erase(place.key);
      } else {
        place.parent->erase(place.index);
      }
      break;
    case 1:
    case 2:
      value =
          value.is_string() ? nlohmann::json(damaged_text(value, random)) : random_value(random);
      break;
    case 3:
      if (in_object) {
        const nlohmann::json moved = value;
        place.parent->erase(place.key);
        (*place.parent)[damaged_text(place.key, random)] = moved;
      }
      break;
    case 4:
      value = random_value(random);
      break;
    default:
      if (in_object)
        (*place.parent)[places[random.below(places.size())].key] = random_value(random);
  }
}

TEST(ConfigMutationsTest, AreErrorsOrTheStoredNumbers) {
  const char* given = std::getenv("FUSEDMOE_MUTATIONS");
  const int count = given ? std::atoi(given) : 600;
  std::vector<Stored> files;
  for (const Layers& wanted : layers()) files.emplace_back(wanted);
  Random random(given ? static_cast<std::uint64_t>(count) : 1);
  std::map<std::string, int> outcomes;
  for (int i = 0; i < count; ++i) {
    const Stored& file = files[static_cast<std::size_t>(i) % files.size()];
    nlohmann::json config = file.config;
    for (std::uint64_t k = 0, times = 1 + random.below(2); k < times; ++k) {
      damage(config["quantization_config"], random);
    }
    const std::string text = config.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    const std::string bytes = file.with(text);
    try {
      const Checkpoint checkpoint = Checkpoint::parse(bytes.data(), bytes.size(), "damaged");
      for (std::size_t k = 0; k < file.schemes.size(); ++k) {
        const LayerWeights layer = checkpoint.load_layer(static_cast<std::int64_t>(k));
        const std::vector<float> values = decode(layer);
        const bool same = name(layer.experts.scheme) == file.schemes[k] &&
                          checkpoint.config().layout == file.layout;
        ++outcomes[same ? "same" : "other"];
        EXPECT_TRUE(!same || values == file.values[k]) << i << " layer " << k << " " << text;
      }
    } catch (const Error&) {
      ++outcomes["error"];
    }
  }
  EXPECT_GT(outcomes["error"], 0);
  EXPECT_GT(outcomes["same"], 0);
  for (const auto& [what, times] : outcomes) RecordProperty(what, times);
}

}  // namespace fusedmoe::config_mutations_test
