// Checkpoints of several layers in different formats, made of ones that have one layer each.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "linear_parts.h"

namespace fusedmoe::testing {

using Tensors = std::map<std::string, Tensor, std::less<>>;

inline constexpr const char* kPrefix = "model.layers.0.";

/// The only layer of a checkpoint in this format; "bf16": of the one that all others are made of.
inline std::filesystem::path source_of(const std::string& scheme, CheckpointLayout layout,
                                       const std::string& family) {
  const TinyCheckpoints& checkpoints = TinyCheckpoints::instance();
  return scheme == "bf16" ? checkpoints.source(family)
                          : checkpoints.quantized(family, scheme, layout);
}

/// A checkpoint in one file, whose tensors are to be chosen.
struct File {
  nlohmann::json config;
  std::string quantization;  ///< as text, whose order may count
  Tensors tensors;
  TemporaryDirectory directory{};

  /// Adds the tensors of a source's layer whose names hold `part`, as those of layer `number`.
  void add(const std::filesystem::path& source, std::int64_t number, const std::string& part = "") {
    for (const auto& [name, tensor] : tensors_of(source)) {
      if (!name.starts_with(kPrefix) || name.find(part) == std::string::npos) continue;
      tensors["model.layers." + std::to_string(number) + name.substr(14)] = tensor;
    }
  }
  std::string text() const {
    std::string result = config.dump();
    result.pop_back();
    return result + R"(, "quantization_config": )" + quantization + "}";
  }
  Checkpoint open() const {
    const std::map<std::string, TensorView> views(tensors.begin(), tensors.end());
    save_safetensors(directory / "x.safetensors", views, {{"config", text()}});
    return Checkpoint::open(directory / "x.safetensors");
  }
};

struct Layers {
  const char* name;
  const char* quantization;
  CheckpointLayout layout;
  std::vector<const char*> schemes;  ///< of layers 0, 1, ...: "a+b" for other down matrices
  const char* family = "qwen3_moe-wide";
};

/// Formats of gate and up, and of down.
inline std::pair<std::string, std::string> formats_of(const std::string& scheme) {
  const std::size_t plus = scheme.find('+');
  return {scheme.substr(0, plus), plus == std::string::npos ? scheme : scheme.substr(plus + 1)};
}

inline void fill(const Layers& wanted, File& file) {
  file.config = nlohmann::json::parse(tiny_config(wanted.family));
  file.config["num_hidden_layers"] = wanted.schemes.size();
  file.quantization = wanted.quantization;
  for (std::size_t i = 0; i < wanted.schemes.size(); ++i) {
    const auto number = static_cast<std::int64_t>(i);
    const auto [first, down] = formats_of(wanted.schemes[i]);
    file.add(source_of(first, wanted.layout, wanted.family), number);
    if (down == first) continue;
    std::erase_if(file.tensors, [&](const auto& entry) {
      return entry.first.starts_with("model.layers." + std::to_string(i)) &&
             entry.first.find("down_proj") != std::string::npos;
    });
    file.add(source_of(down, wanted.layout, wanted.family), number, "down_proj");
  }
}

// What configs begin with, and groups of compressed-tensors.
#define FUSEDMOE_GPTQ R"("quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true, )"
#define FUSEDMOE_ROUND                                                          \
  R"("quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", )" \
  R"("bits": 4, "group_size": 32, "sym": true, "iters": 200, )"
#define FUSEDMOE_AWQ R"("quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, )"
#define FUSEDMOE_FP8 R"("quant_method": "fp8", "weight_block_size": [128, 128], )"
#define FUSEDMOE_CT R"("quant_method": "compressed-tensors", "format": "mixed-precision", )"
#define FUSEDMOE_INT4                                          \
  R"("format": "pack-quantized", "weights": {"num_bits": 4, )" \
  R"("type": "int", "strategy": "group", "group_size": 32, "actorder": "weight"})"
#define FUSEDMOE_INT8                                          \
  R"("format": "pack-quantized", "weights": {"num_bits": 8, )" \
  R"("type": "int", "strategy": "group", "group_size": 32, "actorder": false})"
#define FUSEDMOE_CHANNEL                                        \
  R"("format": "float-quantized", "weights": {"num_bits": 8, )" \
  R"("type": "float", "strategy": "channel", "dynamic": false})"
#define FUSEDMOE_TOKEN                                        \
  R"("input_activations": {"num_bits": 8, "type": "float", )" \
  R"("strategy": "token", "dynamic": true})"

}  // namespace fusedmoe::testing
