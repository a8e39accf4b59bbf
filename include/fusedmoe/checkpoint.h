// Published model checkpoints: which family, which layers, and one MoE layer's weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fusedmoe/export.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/safetensors.h"

namespace fusedmoe {

namespace checkpoint {
struct FamilyRow;
struct QuantRules;
}  // namespace checkpoint

/// A model family: a description of its tensors, the keys of its config, its router and its
/// activation (docs/families.md). Descriptions are JSON; many are built in.
class FUSEDMOE_API Family {
 public:
  Family() = default;
  /// A built-in one by its model_type, or that of a JSON file. Throws Error listing the names.
  static Family named(std::string_view name_or_file);
  /// Those of a JSON text, which may build on built-in ones. Throws Error naming the place.
  static std::vector<Family> parse(std::string_view json, const std::string& label);
  /// Every built-in one, also those that are refused.
  static std::vector<Family> all();

  /// The `model_type` of the published config: "gpt_oss", "mixtral", ...
  std::string_view name() const;
  /// Why nothing here computes such models; empty: they are computed.
  std::string_view refused() const;
  /// The whole description.
  std::string_view json() const;

  bool operator==(const Family& other) const { return name() == other.name(); }

  explicit Family(std::shared_ptr<const checkpoint::FamilyRow> row) : row_(std::move(row)) {}
  const std::shared_ptr<const checkpoint::FamilyRow>& row() const { return row_; }

 private:
  std::shared_ptr<const checkpoint::FamilyRow> row_;
};
FUSEDMOE_API std::string_view name(const Family& family);

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
  Family family;
  std::int64_t num_layers = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  /// Columns of what the routed experts read and write, where projections bring `hidden` columns to
  /// so many before them and back behind them (Nemotron-H). 0: no projections.
  std::int64_t latent = 0;
  std::int64_t shared_intermediate = 0;  ///< total width of the shared experts; 0 = none
  bool shared_expert_gate = false;       ///< Qwen2
  bool average_with_shared = false;      ///< Cohere: half of the sum of routed and shared
  bool has_correction_bias = false;      ///< DeepSeek V3, GLM 4
  bool has_router_bias = false;          ///< gpt-oss
  bool has_bias = false;                 ///< gpt-oss: biases of the experts
  Activation activation = Activation::kSilu;
  ActivationParams activation_params;
  Activation shared_activation = Activation::kSilu;  ///< of the shared experts
  ActivationParams shared_activation_params;
  RouterConfig router;
  /// Of the first layer with quantized experts, as published; of a checkpoint that of its first
  /// layer with experts. The dtype of unquantized tensors decides on loading.
  QuantScheme scheme;
  CheckpointLayout layout = CheckpointLayout::kPlain;  ///< of quantized layers
  /// What quantization_config says about each module; none: nothing is quantized.
  std::shared_ptr<const checkpoint::QuantRules> quantization;

  /// Of the routed experts.
  std::int64_t experts_hidden() const { return latent > 0 ? latent : hidden; }
};

/// From the text of a config.json (nested text_config is followed). Its model_type says the family
/// unless one is given. Where layers differ (limits of the activation), it is the last layer's.
/// Throws Error naming the key.
FUSEDMOE_API ModelConfig parse_model_config(std::string_view config_json,
                                            const Family& family = {});

/// config.json text of a published model: "gpt-oss-20b", "gpt-oss-120b", "mixtral-8x7b",
/// "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "llama4-scout". Throws Error listing them.
FUSEDMOE_API std::string model_preset(std::string_view model);
FUSEDMOE_API std::vector<std::string> model_preset_names();

/// The configuration an implementation is chosen by. `dtype`: of the hidden states.
FUSEDMOE_API MoeConfig moe_config(const ModelConfig& model, DType dtype, Device device = {});

/// An input scale of an expert that saw no calibration data: it is missing in the file, or is 0,
/// negative, infinite or NaN there. The expert takes the largest one of the layer's others.
struct UncalibratedScale {
  std::string tensor;  ///< its name
  std::string value;   ///< what the file has, or "missing"
  float used;
};

struct CheckpointOptions {
  FileAccess access = FileAccess::kMap;
  Family family = {};  ///< none: by the model_type of the config
};

/// A directory (config.json + *.safetensors, with or without an index), one safetensors file whose
/// metadata key `config` holds the config, or a GGUF file (of several: any). Opening reads headers
/// only. See SafetensorsFile for what must not happen to mapped files while weights of them live,
/// and for reading instead.
class FUSEDMOE_API Checkpoint {
 public:
  static Checkpoint open(const std::filesystem::path& path, const CheckpointOptions& options = {});
  /// The same for one safetensors file in memory, which must outlive every tensor (used by the
  /// fuzzer).
  static Checkpoint parse(const void* data, std::size_t size, std::string label);

  /// Paths of all files that the checkpoint consists of: config, index, tensors.
  const std::vector<std::string>& files() const;

  /// What the config says of the first MoE layer that can be read, with the scheme that its tensors
  /// have; or of another one.
  const ModelConfig& config() const;
  ModelConfig config(std::int64_t layer) const;
  /// config() of a checkpoint whose experts have one scheme in all layers. Throws Error naming the
  /// schemes and their layers if there are several.
  const ModelConfig& common_config() const;
  /// Layers that hold experts, ascending; a file without the `model.layers.N.` prefix is layer 0.
  std::vector<std::int64_t> moe_layers() const;
  /// Strict: an expert tensor of the layer that nothing claims, a missing one, or a wrong shape or
  /// dtype is an Error that lists all of them; and so is a file that has changed since the opening.
  LayerWeights load_layer(std::int64_t layer) const;
  struct LayerSchemes {
    QuantScheme experts;
    std::optional<QuantScheme> shared_experts;
  };
  /// The same checks without reading weights: everything that names, shapes and dtypes tell.
  LayerSchemes check_layer(std::int64_t layer) const;
  /// The input scales of the layer that the file does not have. Throws Error where no expert has
  /// one.
  std::vector<UncalibratedScale> uncalibrated(std::int64_t layer) const;
  /// What one rank holds of it, as local_weights() cuts it. Tensors of other ranks' experts are
  /// checked by name, shape and dtype, but their bytes are never read, input scales aside where one
  /// of the rank's own is missing; where all experts share a tensor that holds for mapped files
  /// (FileAccess::kMap).
  LayerWeights load_layer(std::int64_t layer, const ParallelConfig& parallel,
                          const std::optional<ExpertPlacement>& placement = {}) const;
  /// Loads one expert of a layer and reads no other: what MoeLayer::rebind() asks for when an
  /// expert is lost.
  ExpertWeights load_expert(std::int64_t layer, std::int64_t expert) const;
  /// Name, dtype, shape and file of every tensor of the layer's MoE block.
  struct TensorInfo {
    std::string name;
    DType dtype;
    Shape shape;
    std::int64_t nbytes;
    std::string file;
    std::string format;  ///< name of the dtype; of quantized tensors in GGUF files "Q4_K" and such
  };
  std::vector<TensorInfo> layer_tensors(std::int64_t layer) const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace fusedmoe
