// Which tensors an MoE block of a model holds, by the description of its family.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/family.h"
#include "checkpoint/linear_layouts.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

/// What a tensor of an MoE block is; decides dtypes on loading and values in synthesis.
enum class TensorRole {
  kRouterWeight,
  kRouterBias,
  kCorrectionBias,
  kExpertWeight,
  kExpertBias,
  kMxfp4Blocks,
  kMxfp4Scales,
  kSharedWeight,
  kSharedGate,
  kLatentWeight,
  kQuantized,  ///< TensorSpec::stored says which part of a linear layer
};

/// How the names of a linear layer's tensors follow from the layer's.
enum class Naming {
  kModule,  ///< "<name>.weight", "<name>.weight_scale"
  kJoined,  ///< "<name>", "<name>_weight_scale": the tensors are parameters of a larger module
  kShort,   ///< "<name>", "<name>_scale"
};

/// A linear layer, or a stack of one for each expert, whose tensors have a first dimension more.
struct LinearLayer {
  std::string name;  ///< "mlp.experts.0.up_proj"
  LinearShape shape;
  std::string bias{};  ///< name of the tensor; empty: none
  Naming naming = Naming::kModule;
  std::int64_t experts = 0;                   ///< of a stack; 0: no stack
  bool transposed = false;                    ///< a stack of matrices (in, out)
  bool flat = false;                          ///< a stack whose first two dimensions are one
  std::optional<GateUpLayout> gate_and_up{};  ///< how the rows of both lie in it
};

/// "<name>.weight_scale", or as the layer's naming has it.
std::string part_name(const LinearLayer& layer, std::string_view suffix);

struct TensorSpec {
  std::string name;  ///< from the block on: "mlp.experts.0.up_proj.weight"
  Shape shape;
  TensorRole role;
  std::int64_t fan_in;
  const StoredTensor* stored = nullptr;
  bool required = true;
  std::int64_t experts = 0;  ///< of the stack that the tensor belongs to; 0: none
  bool gate_and_up = false;
};

/// How linear layers of one kind are stored.
struct LinearStorage {
  const LinearLayout* layout = nullptr;  ///< null: not quantized, or not in linear layers
  QuantScheme scheme{};                  ///< where they are quantized; without `down`
  std::string source{};                  ///< which words of the config say so

  explicit operator bool() const { return layout != nullptr; }
};

struct BlockStorage {
  LinearStorage experts, down;  ///< gate and up of the routed experts, and down
  LinearStorage shared, shared_down;
  LinearStorage shared_gate, latent;
};
/// Whether some matrices of the routed experts are quantized by the words of the config.
inline bool is_quantized(const BlockStorage& storage) {
  return storage.experts.scheme.weights.quantized() || storage.down.scheme.weights.quantized();
}

/// Under which of the names that the family knows the tensors of a block lie. Full names, from the
/// layer on; empty: the model has no such tensor.
struct BlockLayout {
  std::string block;  ///< path segment, "mlp"
  const ExpertLayout* experts = nullptr;
  std::string router, router_bias, correction_bias, shared_gate;
  SharedNames shared;
  std::string latent_down, latent_up;  ///< linear layers
  BlockStorage storage;
  Naming naming = Naming::kJoined;  ///< of stacks whose names do not end in ".weight"
};

/// "block.pattern" with `*` replaced by the expert's index; "pattern" for "/pattern".
std::string tensor_name(std::string_view block, std::string_view pattern, std::int64_t expert = 0);

/// The names under which the family publishes a model, in this layout of experts.
BlockLayout published_names(const ModelConfig& model, const ExpertLayout& experts);
/// The same for the layout in which it publishes weights of the model's scheme.
BlockLayout published_layout(const ModelConfig& model);

/// The linear layers of one expert or the stacks that hold it (not of MXFP4 blocks), and those of
/// the shared experts: gate, up and down; the first of gate and up, and down; or without a gate the
/// first and the last.
std::vector<LinearLayer> expert_layers(const ModelConfig& model, const BlockLayout& layout,
                                       std::int64_t expert);
std::vector<LinearLayer> shared_layers(const ModelConfig& model, const BlockLayout& layout);

/// The gate of the shared experts, (1, hidden), and the projections around the routed ones: down
/// (latent, hidden) and up. Those that the model has.
std::vector<LinearLayer> shared_gate_layer(const ModelConfig& model, const BlockLayout& layout);
std::vector<LinearLayer> latent_layers(const ModelConfig& model, const BlockLayout& layout);

/// The tensors of a linear layer: "<name>.weight" of this role, or those in which it is stored.
std::vector<TensorSpec> linear_tensors(const LinearLayer& layer, const LinearStorage& storage,
                                       TensorRole role);

/// Every tensor that an MoE block of this model holds in this layout.
std::vector<TensorSpec> block_tensors(const ModelConfig& model, const BlockLayout& layout);

}  // namespace fusedmoe::checkpoint
