// PrepareAndFinalize: what happens to activations before and after the experts: weight on input,
// quantize, dispatch; weight, reduce, combine. One object, because a transport connects the halves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "fusedmoe/experts.h"
#include "fusedmoe/export.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// What prepare hands to the experts. Undefined ids or weights mean "the caller's still hold".
struct Prepared {
  TensorView hidden_states;
  TensorView hidden_scales;
  TensorView expert_num_tokens;
  TensorView topk_ids;
  TensorView topk_weights;
};

/// What prepare does to the hidden states on their way to the experts, out of place, in this order.
struct Preparation {
  bool apply_router_weight_on_input = false;  ///< topk = 1: multiply by the weight
  std::optional<QuantKey> quant;              ///< quantize; none: they keep their dtype
  std::optional<float> scale;                 ///< of a static key
};

/// What `experts` leave to prepare; `a1_scale`: see PackedWeights::Info.
FUSEDMOE_API Preparation make_preparation(const Experts& experts, const QuantScheme& scheme,
                                          bool apply_router_weight_on_input,
                                          std::optional<float> a1_scale = {});

struct PrepareArgs {
  TensorView hidden_states;  ///< (num_tokens, hidden); never modified
  TensorView topk_ids;       ///< (num_tokens, topk) i32; no_ep needs neither ids ...
  TensorView topk_weights;   ///< (num_tokens, topk) f32; ... nor weights unless on the input
  TensorView expert_map;     ///< optional
  std::int64_t num_local_experts = 0;
  Preparation preparation;
  /// workspace_bytes(), 64-byte aligned; holds what prepare returns, until finalize is done.
  void* workspace = nullptr;
  Stream stream;
};

struct FinalizeArgs {
  TensorView output;        ///< (num_tokens, hidden), written completely
  TensorView fused_output;  ///< what the experts wrote; may be `output` itself
  TensorView topk_ids;
  TensorView topk_weights;
  TensorView expert_map;
  std::int64_t num_local_experts = 0;
  bool router_weight_on_input = false;  ///< prepare has applied the weights: sum without them
  WeightAndReduce weight_and_reduce = WeightAndReduce::kNoOp;
  void* workspace = nullptr;  ///< the one that prepare had, untouched since
  Stream stream;
};

/// Both halves work on the stream of their arguments, which must be of the device of all views.
/// Quantization, so far, is done on the CPU only.
class FUSEDMOE_API PrepareAndFinalize {
 public:
  virtual ~PrepareAndFinalize() = default;

  /// Stable name: "no_ep", "batched".
  virtual std::string_view name() const = 0;
  virtual ActivationFormat activation_format() const = 0;
  /// Whether it can serve the configuration; the format is compared by the selection.
  virtual Support supports(const MoeConfig& config) const = 0;
  /// Whether finalize leaves the sum over all ranks (false: a reduction over ranks must follow).
  virtual bool output_is_reduced() const { return true; }
  /// Ranks that can send to this one.
  virtual int num_dispatchers() const { return 1; }

  /// Size that the experts see for a forward of num_tokens rows: the same, or the row capacity
  /// per expert in the batched format.
  virtual ProblemSize problem_size(const ProblemSize& caller) const { return caller; }
  /// Whether finalize knows what to do with the output of such experts.
  virtual bool accepts(WeightAndReduce kind) const = 0;
  /// Scratch that prepare needs until finalize returns.
  virtual std::size_t workspace_bytes(const ProblemSize& caller,
                                      const Preparation& preparation) const = 0;
  virtual Prepared prepare(const PrepareArgs& args) const = 0;
  virtual void finalize(const FinalizeArgs& args) const = 0;
};

/// One rank, standard format.
FUSEDMOE_API std::shared_ptr<const PrepareAndFinalize> make_no_ep();
/// One rank, batched format: tokens are copied to (num_local_experts, capacity, hidden), capacity
/// = the number of tokens of the call, in ascending token order per expert. A token may therefore
/// name an expert once only: prepare throws Error for a duplicate id, or on CUDA, where it cannot
/// see the ids, drops all slots of the token but the first that name it. Rows of an expert behind
/// expert_num_tokens are neither written nor read.
FUSEDMOE_API std::shared_ptr<const PrepareAndFinalize> make_batched();

}  // namespace fusedmoe
