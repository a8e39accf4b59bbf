// Published model checkpoints: which family, which layers, and one MoE layer's weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/export.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/safetensors.h"

namespace fusedmoe {

enum class Family {
  kGptOss,
  kMixtral,
  kQwen2Moe,
  kQwen3Moe,
  kDeepseekV2,
  kDeepseekV3,
  kLlama4,
  kOlmoe,
  kGraniteMoe,
  kGlm4Moe,
};
/// The `model_type` of the published config: "gpt_oss", "mixtral", ...
FUSEDMOE_API std::string_view name(Family family);

/// How a checkpoint names and packs the tensors of its quantized linear layers.
enum class CheckpointLayout {
  kPlain,              ///< not quantized
  kGptOss,             ///< stacked MXFP4 blocks and scales
  kFp8,                ///< quant_method fp8: DeepSeek's blocks, or one scale per tensor
  kCompressedTensors,  ///< llm-compressor; every scheme
  kModelOpt,           ///< NVIDIA ModelOpt
  kGptq,               ///< zero points stored minus one
  kGptqV2,             ///< GPTQ with zero points as they are
  kAwq,
};
/// "plain", "gpt-oss", "fp8", "compressed-tensors", "modelopt", "gptq", "gptq_v2", "awq".
FUSEDMOE_API std::string_view name(CheckpointLayout layout);
/// Inverse, also of "deepseek" for "fp8". Throws Error listing the names.
FUSEDMOE_API CheckpointLayout parse_checkpoint_layout(std::string_view text);

/// What a model's config.json says about its MoE layers.
struct ModelConfig {
  Family family = Family::kGptOss;
  std::int64_t num_layers = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t shared_intermediate = 0;  ///< total width of the shared experts; 0 = none
  bool shared_expert_gate = false;       ///< Qwen2
  bool has_correction_bias = false;      ///< DeepSeek V3, GLM 4
  bool has_bias = false;                 ///< gpt-oss: biases of router and experts
  Activation activation = Activation::kSilu;
  ActivationParams activation_params;
  RouterConfig router;
  QuantScheme scheme;  ///< as published; the dtype of unquantized tensors decides on loading
  CheckpointLayout layout = CheckpointLayout::kPlain;
};

/// From the text of a config.json (nested text_config is followed). Throws Error naming the key.
FUSEDMOE_API ModelConfig parse_model_config(std::string_view config_json);

/// config.json text of a published model: "gpt-oss-20b", "gpt-oss-120b", "mixtral-8x7b",
/// "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "llama4-scout". Throws Error listing them.
FUSEDMOE_API std::string model_preset(std::string_view model);
FUSEDMOE_API std::vector<std::string> model_preset_names();

/// The configuration an implementation is chosen by. `dtype`: of the hidden states.
FUSEDMOE_API MoeConfig moe_config(const ModelConfig& model, DType dtype, Device device = {});

/// A directory (config.json + *.safetensors, with or without an index) or one safetensors file
/// whose metadata key `config` holds the config. Opening reads headers only. See SafetensorsFile
/// for what must not happen to mapped files while weights of them live, and for reading instead.
class FUSEDMOE_API Checkpoint {
 public:
  static Checkpoint open(const std::filesystem::path& path, OpenOptions options = {});
  /// The same for one safetensors file in memory, which must outlive every tensor (used by the
  /// fuzzer).
  static Checkpoint parse(const void* data, std::size_t size, std::string label);

  /// Paths of all files that the checkpoint consists of: config, index, tensors.
  const std::vector<std::string>& files() const;

  /// With the scheme that the tensors of the first MoE layer have.
  const ModelConfig& config() const;
  /// Layers that hold experts, ascending; a file without the `model.layers.N.` prefix is layer 0.
  std::vector<std::int64_t> moe_layers() const;
  /// Strict: an expert tensor of the layer that nothing claims, a missing one, or a wrong shape or
  /// dtype is an Error that lists all of them; and so is a file that has changed since the opening.
  LayerWeights load_layer(std::int64_t layer) const;
  /// Name, dtype, shape and file of every tensor of the layer's MoE block.
  struct TensorInfo {
    std::string name;
    DType dtype;
    Shape shape;
    std::int64_t nbytes;
    std::string file;
  };
  std::vector<TensorInfo> layer_tensors(std::int64_t layer) const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace fusedmoe
