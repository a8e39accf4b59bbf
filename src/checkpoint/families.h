// What distinguishes the model families: names and layouts of tensors, keys of config.json and
// router settings. A family is one row of the table in families.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/linear_layouts.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

enum class ExpertStorage {
  kPerExpert,          ///< linear layers w1, w3 (I, H) and w2 (H, I) for every expert
  kStacked,            ///< w13 (E, 2I, H), w2 (E, H, I)
  kStackedTransposed,  ///< w13 (E, H, 2I), w2 (E, I, H)
  kMxfp4,              ///< blocks (E, 2I, H / 32, 16) and scales (E, 2I, H / 32); same for w2
};

/// Tensor names below the MoE block. In per-expert layouts they are names of linear layers, without
/// ".weight" and the like, and the segment `*` is the expert's index.
struct ExpertLayout {
  ExpertStorage storage;
  GateUpLayout gate_up;      ///< of stacked tensors
  std::string_view w1;       ///< gate; w13 of stacked layouts
  std::string_view w3 = {};  ///< up; per-expert layouts only
  std::string_view w2;
  std::string_view w13_scales = {}, w2_scales = {};
  std::string_view w13_bias = {}, w2_bias = {};
};

/// How config.json gives the width of the shared experts.
enum class SharedWidth { kNone, kCountTimesExpert, kOwnKey, kSameAsExpert };

/// When the chosen weights are divided by their sum.
enum class Renormalize { kNever, kAlways, kKeyElseNever, kKeyElseAlways };

struct FamilyRow {
  Family family;
  std::string_view model_type;
  std::string_view text_type;                ///< model_type of a text-only or nested config
  std::string_view prefix;                   ///< published, before the layer number
  std::span<const std::string_view> blocks;  ///< names of the MoE block, published one first
  std::span<const ExpertLayout> layouts;     ///< published one first
  std::string_view router;                   ///< (E, H)
  std::string_view router_bias = {};         ///< (E); empty: none
  std::string_view correction_bias = {};     ///< (E)
  std::string_view shared = {};              ///< gate_proj, up_proj, down_proj .weight below it
  std::string_view shared_gate = {};         ///< (1, H)
  std::string_view intermediate_key;         ///< per expert
  SharedWidth shared_width = SharedWidth::kNone;
  ScoringFunc scoring = ScoringFunc::kSoftmax;
  Renormalize renormalize = Renormalize::kNever;
  std::string_view topk_method = {};  ///< default of that key; empty: the family has no groups
  bool weight_on_input = false;
  bool swiglu_oai = false;  ///< gpt-oss activation; otherwise hidden_act names it
};

std::span<const FamilyRow> family_table();
const FamilyRow& family_row(Family family);

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
  kQuantized,  ///< TensorSpec::stored says which part of a linear layer
};

/// A linear layer that a tensor belongs to.
struct LinearLayer {
  std::string name;  ///< "mlp.experts.0.up_proj"
  LinearShape shape;
};

struct TensorSpec {
  std::string name;  ///< from the block on: "mlp.experts.0.up_proj.weight"
  Shape shape;
  TensorRole role;
  std::int64_t fan_in;
  const StoredTensor* stored = nullptr;
  bool required = true;
};

/// How the linear layers of the experts and of the shared experts are stored; null: not quantized.
struct BlockStorage {
  const LinearLayout* experts = nullptr;
  const LinearLayout* shared = nullptr;
};

/// "block.pattern" with `*` replaced by the expert's index.
std::string tensor_name(std::string_view block, std::string_view pattern, std::int64_t expert = 0);

/// Gate, up and down of one expert (per-expert layouts), and of the shared experts.
std::array<LinearLayer, 3> expert_layers(const ModelConfig& model, std::string_view block,
                                         const ExpertLayout& layout, std::int64_t expert);
std::array<LinearLayer, 3> shared_layers(const ModelConfig& model, std::string_view block);

/// The tensors of a linear layer: "<name>.weight" of this role, or those of the layout for weights
/// of `scheme`.
std::vector<TensorSpec> linear_tensors(const LinearLayer& layer, const LinearLayout* layout,
                                       const QuantScheme& scheme, TensorRole role);

/// Every tensor that an MoE block of this model holds in this layout.
std::vector<TensorSpec> block_tensors(const ModelConfig& model, std::string_view block,
                                      const ExpertLayout& layout, const BlockStorage& storage = {});

/// The layout in which the family publishes weights of the model's scheme.
const ExpertLayout& published_layout(const ModelConfig& model);

}  // namespace fusedmoe::checkpoint
