// Experts: permute, grouped GEMM, activation, grouped GEMM, unpermute.
//
// Modular implementations take top-k ids and weights; monolithic ones take router logits. After
// vLLM's FusedMoEExpertsModular / FusedMoEExpertsMonolithic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/export.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/router.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe {

/// Shape of the activations that travel between prepare, experts and finalize.
enum class ActivationFormat {
  kStandard,        ///< (num_tokens, hidden)
  kBatchedExperts,  ///< (num_local_experts, max_tokens, hidden) + expert_num_tokens
};
FUSEDMOE_API std::string_view name(ActivationFormat format);

/// Sizes of the parallel groups a layer lives in.
struct ParallelConfig {
  int tp_size = 1;
  int dp_size = 1;
  int ep_size = 1;
  int ep_rank = 0;
  bool operator==(const ParallelConfig&) const = default;
};

/// Everything about a layer that an implementation may accept or refuse.
struct MoeConfig {
  std::int64_t num_experts = 0;        ///< global
  std::int64_t num_local_experts = 0;  ///< on this rank
  std::int64_t topk = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;  ///< per expert, per tensor-parallel rank
  DType dtype = DType::kBF16;     ///< of hidden states and output
  QuantScheme scheme;
  Activation activation = Activation::kSilu;
  ActivationParams activation_params;
  bool has_bias = false;
  bool has_expert_map = false;
  bool apply_router_weight_on_input = false;
  RoutingMethod routing_method = RoutingMethod::kUnspecified;
  ActivationFormat activation_format = ActivationFormat::kStandard;
  ParallelConfig parallel;
  Device device;
  bool batch_invariant = false;  ///< require rows that do not depend on their batch
  bool hooks = false;            ///< require injection points, see ExpertsHooks
};

/// Yes, or a reason with the value that failed.
struct Support {
  Reason reason = Reason::kSupported;
  std::string text;

  explicit operator bool() const { return reason == Reason::kSupported; }
  static Support yes() { return {}; }
  static Support no(Reason reason, std::string text) { return {reason, std::move(text)}; }
};

/// Who multiplies by the router weights and sums over the top-k rows of a token.
enum class WeightAndReduce {
  kNoOp,          ///< the experts have done it; finalize only copies, if it must
  kContiguous,    ///< finalize reduces (num_tokens * topk, hidden) rows in slot order
  kNaiveBatched,  ///< finalize gathers from (num_local_experts, max_tokens, hidden)
  kDelegate,      ///< whichever of the two fits the PrepareAndFinalize
};
FUSEDMOE_API std::string_view name(WeightAndReduce kind);

/// Size of one forward. For the batched format num_tokens is the row capacity per expert.
struct ProblemSize {
  std::int64_t num_tokens = 0;
  std::int64_t topk = 0;
  std::int64_t num_local_experts = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  DType dtype = DType::kBF16;  ///< of the layer: hidden states before quantization, and output
  QuantScheme scheme;

  FUSEDMOE_API static ProblemSize of(const MoeConfig& config, std::int64_t num_tokens);
  FUSEDMOE_API static ProblemSize of(const PackedWeights::Info& weights, std::int64_t num_tokens,
                                     std::int64_t topk, DType dtype);
};

/// Scratch memory of one apply(), known before it starts; monotone in num_tokens. workspace13 and
/// the experts' output share memory, both from offset 0: an implementation writes `output` only
/// after its last read of workspace13 and, as forwards may be in place, of the hidden states.
/// workspace2 is disjoint from both.
struct WorkspacePlan {
  std::size_t workspace13_bytes = 0;
  std::size_t workspace2_bytes = 0;
  Shape output_shape;  ///< exact
  DType output_dtype = DType::kBF16;

  /// Bytes of the buffer that workspace13 and the output share.
  FUSEDMOE_API std::size_t common_bytes() const;
  /// common + workspace2, each rounded up to 256 bytes.
  FUSEDMOE_API std::size_t total_bytes() const;
};

/// Rows at an injection point, in the order of the grouped GEMM: those of local expert e are
/// [expert_offsets[e], expert_offsets[e + 1]). Row r belongs to slot permuted_to_slot[r], that is,
/// to token slot / topk. On CUDA the views are of device memory that earlier work of the stream
/// fills, so a callback enqueues its own there; `rows` is then the number of slots, of which those
/// behind the last offset belong to nobody and have slot -1.
struct HookArgs {
  TensorView input;   ///< what the step before read: see ExpertsHooks
  TensorView output;  ///< (rows, width) of the layer's dtype, contiguous; to be changed in place
  TensorView expert_offsets;    ///< (num_local_experts + 1) i32
  TensorView permuted_to_slot;  ///< (rows) i32
  std::int64_t topk = 1;
  Stream stream;  ///< of the forward
};

/// Callbacks that unfused experts call between their steps: to add a LoRA delta, to observe. Called
/// once per forward by one thread, but not for no tokens; they must not allocate if the forward
/// must not. What they throw leaves the forward, with its output untouched. Unset ones cost
/// nothing.
struct ExpertsHooks {
  /// After GEMM 1. input: hidden states as the experts got them, (num_tokens, hidden), dequantized
  /// never: undefined when they are quantized. output: (rows, 2 I), gate then up; or (rows, I).
  std::function<void(const HookArgs&)> after_gemm1;
  /// After the activation. input: GEMM 1's output; output: (rows, I).
  std::function<void(const HookArgs&)> after_activation;
  /// After GEMM 2, before router weights. input: the activated rows, (rows, I), before they are
  /// quantized; output: (rows, hidden).
  std::function<void(const HookArgs&)> after_gemm2;
};

/// Arguments of ModularExperts::apply. Views of memory the caller owns.
struct ExpertsArgs {
  const PackedWeights* weights = nullptr;
  TensorView output;         ///< WorkspacePlan::output_shape; written completely
  TensorView hidden_states;  ///< (num_tokens, hidden) or (E, max_tokens, hidden), prepared
  /// Scales of quantized hidden states (e4m3 or i8): (1, 1) per tensor, (num_tokens, 1) per token,
  /// (num_tokens, groups) per group; batched (1, 1) and (E, max_tokens, ...). Undefined otherwise.
  TensorView hidden_scales;
  TensorView topk_ids;                  ///< (num_tokens, topk) i32 global ids; -1 selects nothing
  TensorView topk_weights;              ///< (num_tokens, topk) f32
  TensorView expert_map;                ///< (num_experts) i32 global -> local or -1; optional
  TensorView expert_num_tokens;         ///< (E) i32: rows that are real; batched format only
  bool router_weight_on_input = false;  ///< already applied: do not weight again
  const ExpertsHooks* hooks = nullptr;  ///< unfused experts only; null = none
  void* workspace13 = nullptr;
  void* workspace2 = nullptr;
  Stream stream;
};

/// Arguments of MonolithicExperts::apply.
struct MonolithicArgs {
  const PackedWeights* weights = nullptr;
  TensorView output;         ///< (num_tokens, hidden)
  TensorView hidden_states;  ///< (num_tokens, hidden), prepared
  TensorView hidden_scales;  ///< as in ExpertsArgs
  TensorView router_logits;  ///< (num_tokens, num_experts) f32
  const RouterConfig* router = nullptr;
  TensorView score_correction_bias;
  TensorView expert_map;
  void* workspace13 = nullptr;
  void* workspace2 = nullptr;
  Stream stream;
};

/// Called after each expert: (done, total).
using PackProgress = std::function<void(std::int64_t, std::int64_t)>;

/// What both kinds share. Objects are immutable and may be used from several threads at once.
class FUSEDMOE_API Experts {
 public:
  virtual ~Experts() = default;

  /// Stable name: "reference", "cpu", "cpu_batched", ...
  virtual std::string_view name() const = 0;
  virtual ActivationFormat activation_format() const = 0;
  virtual bool is_monolithic() const = 0;
  /// True for the plain loops with sums in double that all others are compared with.
  virtual bool is_reference() const { return false; }
  /// Whether apply() calls ExpertsHooks; answers MoeConfig::hooks.
  virtual bool has_hooks() const { return false; }
  virtual Support supports(const MoeConfig& config) const = 0;
  /// True if apply() quantizes the hidden states of such a scheme by itself, as block-scaled FP4
  /// does after the permutation; false if prepare must have done it. Meaningless without quantized
  /// activations.
  virtual bool expects_unquantized_inputs(const QuantScheme& scheme) const;
  /// True if finalize's sum is already in the output (kNoOp), else who does it.
  virtual WeightAndReduce weight_and_reduce() const = 0;
  /// Enough for every tile plan of the problem, so that pinned and tuned ones never change it.
  virtual WorkspacePlan plan(const ProblemSize& problem) const = 0;
  /// Names of the ways in which apply() can run the problem on `device`, the one that it would run
  /// now first; see tune.h. Empty: there is one way.
  virtual std::vector<std::string> tile_plans(const ProblemSize& problem, Device device) const;
  /// Of the packed weights; another number is another layout.
  virtual int layout_version() const { return 1; }

  /// Published layout -> this implementation's layout, expert by expert: extra memory beyond the
  /// result is at most one expert. Throws Error for weights it cannot pack. Experts on CUDA pack
  /// into memory of the calling thread's current CUDA device.
  virtual std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                              const PackProgress& progress = {}) const = 0;
  /// The inverse for one expert, in tensors of its own, as WeightMatrix describes them; zero codes
  /// may come back with the other sign, scales of blocks of zeros as any scale.
  /// The default throws Error: the implementation cannot.
  virtual ExpertWeights unpack(const PackedWeights& packed, std::int64_t expert) const;
  /// Replaces one expert by the first of `weights`, in place (weight updates between training and
  /// inference). No forward may run meanwhile. Checks everything before it writes.
  /// The default throws Error: the implementation cannot.
  virtual void repack(const ExpertWeights& weights, std::int64_t expert,
                      PackedWeights& packed) const;
  /// Whether apply() can use these weights: those that this implementation packed, unless it
  /// shares another's layout.
  virtual bool accepts(const PackedWeights& weights) const {
    return weights.info().implementation == name();
  }
};

class FUSEDMOE_API ModularExperts : public Experts {
 public:
  bool is_monolithic() const final { return false; }
  /// Allocates nothing. num_tokens = 0 is legal.
  virtual void apply(const ExpertsArgs& args) const = 0;
};

class FUSEDMOE_API MonolithicExperts : public Experts {
 public:
  bool is_monolithic() const final { return true; }
  virtual void apply(const MonolithicArgs& args) const = 0;
};

}  // namespace fusedmoe
