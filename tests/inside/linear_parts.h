// A quantized checkpoint in memory, for the tests of quantized linear layers.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>

#include "testing/compare.h"
#include "tiny_checkpoint.h"

namespace fusedmoe::testing {

inline const std::string kExperts = "model.layers.0.mlp.experts.";
constexpr auto kCt = CheckpointLayout::kCompressedTensors;

/// To be changed and written as one file.
struct Parts {
  Parts(const std::string& scheme, CheckpointLayout layout, const std::string& family = "qwen3_moe")
      : Parts(TinyCheckpoints::instance().quantized(family, scheme, layout)) {}
  explicit Parts(const std::filesystem::path& path)
      : tensors(tensors_of(path)), config(read_json(path / "config.json")) {}

  Tensor copy(const std::string& name) {
    const Tensor& from = tensors.at(name);
    Tensor to = Tensor::empty(from.shape(), from.dtype());
    std::copy_n(from.as<const char>(), from.nbytes(), to.as<char>());
    tensors[name] = to;
    return to;
  }

  LayerWeights load() const {
    const TemporaryDirectory directory;
    std::map<std::string, TensorView> views(tensors.begin(), tensors.end());
    save_safetensors(directory / "x.safetensors", views, {{"config", config.dump()}});
    return Checkpoint::open(directory / "x.safetensors").load_layer(0);
  }

  std::string error() const {
    return error_text([&] { load(); });
  }

  nlohmann::json& quantization() { return config["quantization_config"]; }

  std::map<std::string, Tensor, std::less<>> tensors;
  nlohmann::json config;
};

}  // namespace fusedmoe::testing
