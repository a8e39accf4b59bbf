// A model family as data: names and layouts of tensors, keys of config.json, router and activation.
// docs/families.md says what a description holds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

// Limits on the sizes in a config: far above those of any model, and so small that no product of
// them overflows 63 bits.
inline constexpr std::int64_t kMaxWidth = std::int64_t{1} << 18;
inline constexpr std::int64_t kMaxExperts = RouterConfig::kMaxExperts;
inline constexpr std::int64_t kMaxLayers = std::int64_t{1} << 10;

enum class ExpertStorage {
  kPerExpert,          ///< linear layers w1, w3 (I, H) and w2 (H, I) for every expert
  kStacked,            ///< w13 (E, 2I, H), w2 (E, H, I); or w1 and w3 (E, I, H)
  kStackedTransposed,  ///< w13 (E, H, 2I), w2 (E, I, H)
  kRows,               ///< w1, w3 and w2, each (E * I, H)
  kMxfp4,              ///< blocks (E, 2I, H / 32, 16) and scales (E, 2I, H / 32); same for w2
};

/// Tensor names below the MoE block. In per-expert layouts they are names of linear layers, without
/// ".weight" and the like, and the segment `*` is the expert's index. Experts without a gate have
/// their first matrix in w1.
struct ExpertLayout {
  std::string name;  ///< of a layout that several families share; else empty
  ExpertStorage storage = ExpertStorage::kPerExpert;
  GateUpLayout gate_up = GateUpLayout::kGateUp;  ///< of stacked tensors
  std::string w1;                                ///< gate, or w13
  bool both = false;                             ///< w1 is w13
  std::string w3;                                ///< up
  std::string w2;
  std::string w13_scales, w2_scales;
  std::string w13_bias, w2_bias;  ///< w13_bias: of gate alone where w3 is given
  std::string w3_bias;
};

/// Names of the shared experts' linear layers. Where `up` is empty, the tensor `gate` holds gate
/// and up, one behind the other: (2I, H).
struct SharedNames {
  std::string gate, up, down;
};

/// What a description says about one property: the value of a key of the config, or a constant.
template <typename T>
struct Setting {
  std::vector<std::string> keys;  ///< dotted paths; the first one that is given counts
  std::vector<std::pair<std::string, T>> values;  ///< text in the config -> value; empty: as it is
  std::optional<T> otherwise;                     ///< none of the keys, or a constant
};

/// Values of a config key that a family can serve, as JSON text, and why no others.
struct Requirement {
  std::string key;
  std::vector<std::string> values;
  std::string because;
};

struct FamilyRow {
  std::string name;                        ///< model_type of the published config
  std::vector<std::string> types;          ///< other model_types, as those of nested configs
  std::vector<std::string> architectures;  ///< "Qwen2Moe" where that is not the name's
  std::string refused;                     ///< why nothing here computes it; empty: it is computed
  std::string config;  ///< dotted path of the object with the keys; empty: text_config, or the root
  std::string prefix;  ///< published, before the layer number
  std::vector<std::string> blocks;    ///< names of the MoE block, published one first; may be ""
  std::vector<ExpertLayout> layouts;  ///< published one first
  bool gated = true;                  ///< false: experts are w1, activation, w2
  // Where to look for each tensor: names within the block, the published one first. One that begins
  // with '/' is a name within the layer instead.
  std::vector<std::string> router;           ///< (E, H)
  std::vector<std::string> router_bias;      ///< (E)
  std::vector<std::string> correction_bias;  ///< (E)
  std::vector<SharedNames> shared;
  std::vector<std::string> shared_gate;  ///< (1, H)

  Setting<std::int64_t> num_layers, hidden, intermediate, num_experts, topk;
  Setting<std::string> scoring;
  Setting<bool> renormalize;
  Setting<float> scaling;
  Setting<std::int64_t> num_groups, topk_group;
  std::optional<Setting<std::string>> topk_method;  ///< DeepSeek: decides on groups and bias
  bool group_score_of_two = false;                  ///< sum of the two best even without a bias
  double renormalize_epsilon = 1e-20;
  Setting<std::int64_t> zero_experts;  ///< LongCat: their number
  Setting<float> sparsemixer;          ///< PhiMoE: its jitter; nothing set: another router
  Setting<std::int64_t> latent_width;  ///< nothing set or 0: no projections around the experts
  std::vector<std::string> latent_down, latent_up;  ///< linear layers (L, H) and (H, L)
  Setting<bool> has_correction_bias;
  bool weight_on_input = false;
  Setting<std::int64_t> shared_count;  ///< of shared experts
  Setting<std::int64_t> shared_width;  ///< of one; no keys and no constant: that of an expert
  Setting<bool> average_with_shared;   ///< half of the sum of routed and shared
  bool same_limit = true;              ///< the activation's limit holds for them, too
  Setting<float> shared_limit;         ///< one of their own, without same_limit
  Setting<std::string> activation;
  std::string limited;  ///< the activation of layers with a limit; empty: the same
  Setting<float> alpha, beta, limit;
  std::vector<Requirement> required;
  std::vector<std::pair<std::string, std::string>> refused_tensors;  ///< name, reason
  std::vector<std::string> ignores;  ///< keys that mean something elsewhere, but nothing here
  std::vector<std::pair<std::string, std::string>> every_layer;  ///< keys, JSON: all layers are MoE
  std::string json;  ///< the description with what it inherits
};

}  // namespace fusedmoe::checkpoint
