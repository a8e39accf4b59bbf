// Tiny checkpoints of several families and what `quantize` makes of them, made once per process.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "error_text.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/safetensors.h"
#include "nlohmann/json.hpp"
#include "temporary_directory.h"
#include "tools/quantize_checkpoint.h"
#include "tools/synth.h"

namespace fusedmoe::testing {

/// Four experts of 160 x 96: no multiples of 128, but of 32. "<family>-wide": of 256 x 128.
inline std::string tiny_config(const std::string& name) {
  const bool wide = name.ends_with("-wide");
  const std::string family = wide ? name.substr(0, name.size() - 5) : name;
  nlohmann::json config{{"model_type", family},
                        {"num_hidden_layers", 1},
                        {"hidden_size", wide ? 256 : 160},
                        {"num_experts_per_tok", family == "llama4" ? 1 : 2}};
  const bool own_width = family.starts_with("qwen") || family.starts_with("deepseek");
  config[own_width ? "moe_intermediate_size" : "intermediate_size"] = wide ? 128 : 96;
  config[family == "deepseek_v3" ? "n_routed_experts" : "num_local_experts"] = 4;
  if (family == "qwen2_moe" || family == "qwen3_5_moe")
    config["shared_expert_intermediate_size"] = 64;
  if (family == "deepseek_v3") {
    config["n_shared_experts"] = 1;
    config["n_group"] = 2;
    config["topk_group"] = 1;
  }
  return config.dump();
}

class TinyCheckpoints {
 public:
  static const TinyCheckpoints& instance() {
    static const TinyCheckpoints checkpoints;
    return checkpoints;
  }

  std::filesystem::path source(const std::string& family) const {
    const std::filesystem::path path = root_ / family;
    if (!std::filesystem::exists(path)) {
      SynthOptions options;
      options.config_json = tiny_config(family);
      options.num_tokens = 5;
      synthesize_checkpoint(options, path);
    }
    return path;
  }

  std::filesystem::path quantized(const std::string& family, const std::string& scheme,
                                  CheckpointLayout layout) const {
    const std::filesystem::path path =
        root_ / (family + "-" + scheme + "-" + std::string(name(layout)));
    if (!std::filesystem::exists(path)) {
      QuantizeCheckpointOptions options;
      options.scheme = parse_scheme(scheme);
      options.layout = layout;
      quantize_checkpoint(source(family), options, path);
    }
    return path;
  }

 private:
  TinyCheckpoints()
      : root_(std::filesystem::temp_directory_path() /
              ("fusedmoe-tiny-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  ~TinyCheckpoints() { std::filesystem::remove_all(root_); }

  std::filesystem::path root_;
};

/// The tensors of a checkpoint in one file.
inline std::map<std::string, Tensor, std::less<>> tensors_of(
    const std::filesystem::path& checkpoint) {
  return SafetensorsFile::open(checkpoint / "model.safetensors").tensors();
}

inline nlohmann::json read_json(const std::filesystem::path& path) {
  return nlohmann::json::parse(std::ifstream(path));
}

}  // namespace fusedmoe::testing
