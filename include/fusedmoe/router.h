// The router: hidden states -> router logits -> top-k expert ids and weights.
//
// Semantics (docs/routing.md; sources: vLLM's routers and Hugging Face's MoE blocks): logits are
// computed in fp32; ties go to the lowest expert index; the k results of a token are ordered by
// descending selection score; weights are fp32.
// A non-finite score counts as 0 for softmax, sigmoid and sqrt-softplus scoring (before any bias is
// added) and as -infinity when selecting on raw logits; its weight is 0. So without a bias a row of
// NaN selects experts 0..topk-1 with weight 0. Ids are distinct and in range whatever the logits
// hold; in grouped top-k they also lie in the groups kept.
//
// Grouped top-k: a group's score is its largest choice score, or with a correction bias the sum of
// its two largest; the best topk_group groups stay, and the topk best experts of those are chosen.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

enum class ScoringFunc {
  kSoftmax,       ///< softmax over all experts, then top-k
  kSigmoid,       ///< sigmoid of each logit, then top-k
  kSqrtSoftplus,  ///< sqrt(log(1 + exp(logit))), then top-k
  kTopkSoftmax,   ///< top-k of the logits, then softmax over the chosen ones (gpt-oss, granite)
  kTopkSigmoid,   ///< top-k of the logits, then their sigmoid (Llama 4, with topk = 1)
  kLogits,        ///< top-k of the logits, which are the weights
  /// Sparsemixer (PhiMoE, arXiv 2409.12136), without groups: top-k of the logits. Experts are
  /// chosen one after the other. The weight of the one with logit m is a softmax over those of the
  /// experts not chosen before it whose logit x is near m: (m - x) / max(|x|, m) <= 2
  /// sparsemixer_jitter.
  kSparsemixer,
};

/// Who chooses the experts of a token. Monolithic experts route by any RouterConfig, but a callback
/// runs on the host only.
enum class RoutingMethod {
  kNone,    ///< the caller, or the layer: ids and weights are given
  kRouter,  ///< scores of logits, as RouterConfig says
  kCustom,  ///< RouterConfig::custom
};

/// User-defined routing: fills ids (num_tokens, topk) i32 and weights (num_tokens, topk) f32 from
/// logits (num_tokens, num_choices) f32. An id of -1 selects nothing. Called for
/// zero tokens too.
using CustomRouting = std::function<void(const TensorView& logits, const TensorView& topk_ids,
                                         const TensorView& topk_weights)>;

struct RouterConfig {
  /// Routing keeps the scores of one token on the stack.
  static constexpr std::int64_t kMaxExperts = 4096;

  std::int64_t num_experts = 0;  ///< with weights
  std::int64_t topk = 0;
  ScoringFunc scoring = ScoringFunc::kSoftmax;
  bool renormalize = false;  ///< divide the chosen weights by their sum + epsilon
  double renormalize_epsilon = 1e-20;
  std::int64_t num_expert_group = 0;  ///< > 0: grouped top-k (DeepSeek); divides num_choices()
  std::int64_t topk_group = 0;        ///< groups kept
  float routed_scaling_factor = 1;    ///< multiplies the weights, after renormalizing
  bool apply_router_weight_on_input = false;  ///< topk = 1 only: x * weight enters the experts
  /// LongCat: experts without weights, whose ids follow those of the others. Each returns its
  /// input: a layer adds weight * x to the output.
  std::int64_t num_zero_experts = 0;
  float sparsemixer_jitter = 0.01F;  ///< of kSparsemixer
  CustomRouting custom{};            ///< replaces scoring and selection when set

  /// What the router chooses among.
  std::int64_t num_choices() const { return num_experts + num_zero_experts; }

  /// Throws Error naming the field.
  FUSEDMOE_API void validate() const;
};

/// kRouter or kCustom; kNone with zero experts, whose slots the layer takes out.
FUSEDMOE_API RoutingMethod routing_method(const RouterConfig& config);
FUSEDMOE_API std::string_view name(ScoringFunc scoring);

/// Parameters of the gate. Floating-point tensors of any 16- or 32-bit type.
struct RouterWeights {
  Tensor weight{};                 ///< (num_choices, hidden)
  Tensor bias{};                   ///< (num_choices), added to the logits; optional
  Tensor score_correction_bias{};  ///< (num_choices) f32, used for the choice only; optional
};

/// Where each token goes. Views; see route().
struct Routing {
  TensorView topk_ids;      ///< (num_tokens, topk) i32, global expert ids, -1 = nothing
  TensorView topk_weights;  ///< (num_tokens, topk) f32
};

/// Fills `out` from logits (num_tokens, num_choices) f32, bf16 or f16. `correction_bias`
/// (num_choices) f32 may be undefined. Throws Error on shapes or dtypes that do not fit, and when a
/// custom routing returns an id outside [-1, num_choices); allocates nothing.
FUSEDMOE_API void route(const RouterConfig& config, const TensorView& logits,
                        const TensorView& correction_bias, const Routing& out);

/// Logits (num_tokens, num_choices) f32 = x weight^T + bias, accumulated in fp32 in an order that
/// does not depend on num_tokens. x: (num_tokens, hidden) f32, bf16 or f16. Everything contiguous.
FUSEDMOE_API void router_logits(const RouterWeights& weights, const TensorView& x,
                                const TensorView& logits);

// ------------------------------------------------------------------------------------------------
// Index structures built from top-k ids: how many rows each expert gets, and the permutation that
// sorts (token, slot) pairs by expert. Flat slot f = token * topk + j.

/// Views into caller memory of at least routing_data_bytes(); all i32. Slots whose id is -1, out
/// of range, or mapped to -1 by the expert map belong to no row. Rows are in stable order: by
/// local expert, then by flat slot. Duplicate ids in one token give one row each.
struct RoutingData {
  TensorView expert_num_tokens;  ///< (num_local_experts): histogram
  TensorView expert_offsets;     ///< (num_local_experts + 1): exclusive prefix sums; last = rows
  TensorView permuted_to_slot;   ///< (num_tokens * topk): row -> flat slot; -1 behind the last row
  TensorView slot_to_permuted;   ///< (num_tokens * topk): flat slot -> row; -1 where there is none
};

FUSEDMOE_API std::size_t routing_data_bytes(std::int64_t num_tokens, std::int64_t topk,
                                            std::int64_t num_local_experts);

/// Builds the structures in `memory`. topk_ids: (num_tokens, topk) i32. expert_map (num_experts)
/// i32, global -> local or -1, may be undefined (then global = local ids). A negative or too large
/// id never reads the map.
FUSEDMOE_API RoutingData build_routing_data(const TensorView& topk_ids,
                                            const TensorView& expert_map,
                                            std::int64_t num_local_experts, void* memory,
                                            std::size_t memory_bytes);

/// Bit e % 32 of word e / 32 in row t is set when token t chose local expert e. bitmatrix:
/// (num_tokens, ceil(num_local_experts / 32)) i32, overwritten. Duplicates collapse.
FUSEDMOE_API void build_bitmatrix(const TensorView& topk_ids, const TensorView& expert_map,
                                  std::int64_t num_local_experts, const TensorView& bitmatrix);

}  // namespace fusedmoe
