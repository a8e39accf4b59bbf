// The steps of a layer beside its experts, one virtual function each, so that src/layer knows no
// device: src/cpu/backend.cpp and src/cuda/backend.cpp implement them.
//
// All views are contiguous, of the stream's device, and were checked by the caller. Nothing
// allocates or waits. Sums are fp32 in slot order, rounded once: both backends give the same bits,
// but for the router.
#pragma once

#include <optional>

#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/router.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::core {

/// Where the batched format puts the slots. Row r of local expert e is number e * capacity + r.
struct RowAssignment {
  TensorView slot_rows;          ///< (num_tokens, topk) i32: number of the slot's row, -1 without
  TensorView expert_num_tokens;  ///< (num_local_experts) i32
};

/// What finalize reduces; views as in ForwardArgs.
struct ReduceArgs {
  TensorView output;        ///< (num_tokens, hidden), written completely
  TensorView fused_output;  ///< what the experts wrote; may be `output` itself
  TensorView topk_ids;
  TensorView topk_weights;
  TensorView expert_map;
  std::int64_t num_local_experts = 0;
  bool router_weight_on_input = false;  ///< prepare has applied the weights: sum without them
  bool accumulate = false;              ///< output += instead of output =
  Stream stream;
};

class Backend {
 public:
  virtual ~Backend() = default;

  /// As fusedmoe::router_logits() and route(). Custom routing runs on the CPU only; elsewhere it is
  /// an Error. expert_load (num_experts) i32, if defined: += tokens that chose each expert.
  virtual void router_logits(const RouterWeights& weights, const TensorView& x,
                             const TensorView& logits, Stream stream) const = 0;
  virtual void route(const RouterConfig& config, const TensorView& logits,
                     const TensorView& correction_bias, const Routing& out,
                     const TensorView& expert_load, Stream stream) const = 0;
  /// Routing of shared experts, (num_tokens, 1): expert 0 with weight 1, or if `gated` with the
  /// sigmoid, in double, of the logit that topk_weights hold.
  virtual void route_shared(const Routing& out, bool gated, Stream stream) const = 0;

  /// weighted = rnd(x * rnd(weight)) in the dtype of x (num_tokens, hidden); weights
  /// (num_tokens, 1) f32.
  virtual void weight_rows(const TensorView& x, const TensorView& topk_weights,
                           const TensorView& weighted, Stream stream) const = 0;
  /// As fusedmoe::quantize(). The CPU only; elsewhere it is an Error.
  virtual void quantize(const TensorView& x, const QuantKey& key, std::optional<float> scale,
                        const TensorView& values, const TensorView& scales,
                        Stream stream) const = 0;
  /// Rows of the local experts in ascending token order, at most num_tokens each. An id that a
  /// token names twice is an Error on the CPU; a device, which cannot throw, leaves the later slots
  /// without a row. topk_ids (num_tokens, topk); expert_map may be undefined.
  virtual void assign_rows(const TensorView& topk_ids, const TensorView& expert_map,
                           const RowAssignment& out, Stream stream) const = 0;
  /// Copies the rows of `from` (num_tokens, n) to the rows of their slots in `to`
  /// (num_local_experts, capacity, n). Any dtype.
  virtual void dispatch(const TensorView& slot_rows, const TensorView& from, const TensorView& to,
                        Stream stream) const = 0;

  /// output[t] = sum over j of topk_weights[t, j] * row of slot (t, j) in fused_output, or without
  /// the weights if router_weight_on_input. The row of a flat slot is slot_rows[slot], or, where
  /// slot_rows are undefined, the slot's own number if its expert is local. A slot without a row is
  /// skipped. With topk = 1 and no slot_rows, fused_output may be `output`.
  virtual void reduce(const ReduceArgs& args, const TensorView& slot_rows) const = 0;
  /// target = rnd(target + source), in f32, bf16 or f16.
  virtual void add(const TensorView& target, const TensorView& source, Stream stream) const = 0;
};

}  // namespace fusedmoe::core
