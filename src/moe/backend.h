// The steps of a layer beside its experts, one virtual function each, so that src/layer knows no
// device: src/cpu/backend.cpp and src/cuda/backend.cpp implement them.
//
// All views are contiguous, of the stream's device, and were checked by the caller. Nothing
// allocates or waits. Sums are fp32 in slot order, rounded once: both backends give the same bits,
// but for the router.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "fusedmoe/quant.h"
#include "fusedmoe/router.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::core {

/// Ranks between which rows can travel on CUDA: kernels have something of each among their
/// parameters.
inline constexpr int kMostRanksOnCuda = 256;

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
  /// Multiply and add in one rounding, as the experts of the standard format do.
  bool fused_multiply_add = false;
  /// On CUDA: rows [elsewhere_begin, elsewhere_end) of `fused_output` are those of `elsewhere`.
  TensorView elsewhere;
  std::int64_t elsewhere_begin = 0, elsewhere_end = 0;
  /// On the CPU, instead of fused_output and slot rows: the addresses of the slots' rows, which are
  /// of fused_output's dtype, one behind the other for each token; null: the slot has none.
  const std::byte* const* row_addresses = nullptr;
  std::int64_t rows_per_token = 0;
  /// On CUDA: what was enqueued before is one of our kernels, which this one may overlap.
  bool follows_kernel = true;
  Stream stream;
};

/// Where the tokens of a rank go. Row t of the tokens becomes row r * row_stride + i of what is
/// packed for the ranks, if it is the i-th token that goes to rank r.
struct TokenDestinations {
  TensorView topk_ids;  ///< (num_tokens, topk) i32: experts as the router numbers them, or -1
  // The placement: see ExpertPlacement::Table.
  TensorView replica_offsets;      ///< (num_experts + 1) i32
  TensorView replicas;             ///< (num_physical) i32
  TensorView physical_ranks;       ///< (num_physical) i32: place of the rank in the group
  std::int32_t nearest_rank = -1;  ///< takes what it has a replica of; -1: the hash alone chooses
  std::int64_t row_stride = 0;
  // Results. Where all ranks get all tokens, the ids alone: the others are undefined.
  TensorView physical_ids;  ///< (num_tokens, topk) i32, -1 where topk_ids name no expert
  TensorView send_rows;     ///< (num_tokens, num_ranks) i32: packed row, -1: the token stays away
  TensorView send_counts;   ///< (num_ranks) i32
  TensorView send_tokens;   ///< (num_ranks, row_stride) i32: tokens that go there, in order
};

/// Rows of tokens, put where messages to other ranks, or this one's experts, take them from.
struct RowPacking {
  struct Tensor {
    TensorView from;  ///< (num_tokens, n), rows at any distance
    TensorView to;    ///< (rows, n)
  };
  /// Row i of what goes to `rank`, for begin <= i < end, becomes row to + i.
  struct Part {
    int rank;
    std::int64_t begin, end, to;
  };
  std::span<const Tensor> tensors;  ///< at most kMostTensors, each of the same rows
  TensorView ids;                   ///< the `to` that becomes -1 in rows that no token fills
  TensorView tokens;  ///< TokenDestinations::send_tokens; undefined: row i is that of token i
  TensorView counts;  ///< (num_ranks) i32: tokens that there are for a rank; undefined: all
  std::span<const Part> parts;
  static constexpr int kMostTensors = 5;
};

/// Which rows of a plan fit where they go.
struct RowLimits {
  TensorView send_rows;  ///< as TokenDestinations has them; -1 in rows that do not fit
  std::int64_t row_stride = 0;
  std::span<const std::int64_t> room;  ///< for each rank: how many rows fit
  TensorView physical_ids;    ///< may be undefined; -1 in slots whose rank has no room for the row
  TensorView physical_ranks;  ///< as in TokenDestinations
  TensorView dropped;         ///< may be undefined; (1) i32: += rows that do not fit
};

/// Expert rows of a rank: one for each slot of a received row that names a local expert.
struct SlotExpansion {
  TensorView ids;         ///< (num_rows, topk) i32, physical
  TensorView expert_map;  ///< (num_physical) i32: physical -> local or -1; undefined: all are local
  TensorView slot_rows;   ///< out: (num_rows, topk) i32: expert row in slot order, or -1
  TensorView row_ids;     ///< out: (most rows, 1) i32: id of each expert row
  TensorView row_weights;  ///< out: (most rows, 1) f32: 1
  TensorView counts;       ///< scratch: (num_ranks) i32
};

/// Rows that come back to a rank, one for each of its slots.
struct SlotNumbers {
  TensorView physical_ids;    ///< (num_tokens, topk) i32, -1: nothing
  TensorView physical_ranks;  ///< as in TokenDestinations
  TensorView slot_rows;       ///< out: (num_tokens, topk) i32
  TensorView counts;          ///< scratch: (num_ranks) i32
};

/// What a router with zero experts has chosen, in two parts.
struct ZeroExpertsSplit {
  Routing routing;               ///< (num_tokens, topk)
  std::int64_t num_experts = 0;  ///< zero experts have the ids [num_experts, num_choices)
  std::int64_t num_choices = 0;
  TensorView
      expert_ids;  ///< out: (num_tokens, topk) i32, topk_ids with -1 for those from num_experts on
  TensorView zero_weights;  ///< out: (num_tokens, 1) f32, sum of their weights in slot order
};

/// Rows added to rows: (num_tokens, n) in f32, bf16 or f16, one of the two in f32 or both the same.
struct AddArgs {
  TensorView target;
  TensorView source;
  TensorView scale;        ///< (num_tokens, 1) f32; a row of scale 0 adds nothing. Undefined: 1
  bool accumulate = true;  ///< false: target = instead of target +=
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
  /// expert_load (num_choices) i32 += tokens that chose each expert, by topk_ids (num_tokens,
  /// topk).
  virtual void count_choices(const TensorView& topk_ids, const TensorView& expert_load,
                             Stream stream) const = 0;
  /// Routing of shared experts, (num_tokens, 1): expert 0 with weight 1, or if `gated` with the
  /// sigmoid, in double, of the logit that topk_weights hold.
  virtual void route_shared(const Routing& out, bool gated, Stream stream) const = 0;

  virtual void split_zero_experts(const ZeroExpertsSplit& split, Stream stream) const = 0;

  /// weighted = rnd(x * rnd(weight)) in the dtype of x (num_tokens, hidden); weights
  /// (num_tokens, 1) f32.
  virtual void weight_rows(const TensorView& x, const TensorView& topk_weights,
                           const TensorView& weighted, Stream stream) const = 0;
  /// As fusedmoe::quantize(). On CUDA an Error for keys without has_cuda_quantizer().
  virtual void quantize(const TensorView& x, const QuantKey& key, std::optional<float> scale,
                        const TensorView& values, const TensorView& scales,
                        Stream stream) const = 0;
  /// As core::dequantize(), of the same keys.
  virtual void dequantize(const TensorView& values, const TensorView& scales, const QuantKey& key,
                          const TensorView& out, Stream stream) const = 0;
  /// Rows of the local experts in ascending token order, at most num_tokens each. An id that a
  /// token names twice is an Error on the CPU; a device, which cannot throw, leaves the later slots
  /// without a row. topk_ids (num_tokens, topk); expert_map may be undefined.
  virtual void assign_rows(const TensorView& topk_ids, const TensorView& expert_map,
                           const RowAssignment& out, Stream stream) const = 0;
  /// Copies the rows of `from` (num_tokens, n) to the rows of their slots in `to`
  /// (num_local_experts, capacity, n). Any dtype.
  virtual void copy_to_slots(const TensorView& slot_rows, const TensorView& from,
                             const TensorView& to, Stream stream) const = 0;

  /// output[t] = sum over j of topk_weights[t, j] * row of slot (t, j) in fused_output, or without
  /// the weights if router_weight_on_input. The row of a flat slot is slot_rows[slot], or, where
  /// slot_rows are undefined, the slot's own number if its expert is local. A slot without a row is
  /// skipped. With topk = 1 and no slot_rows, fused_output may be `output`. Rows in f32 may be
  /// summed into any output, others into one of their own dtype or f32. Rows with
  /// addresses are multiplied and added in one rounding.
  virtual void reduce(const ReduceArgs& args, const TensorView& slot_rows) const = 0;
  /// The ids of a token's replicas, and which rows go where.
  virtual void find_destinations(const TokenDestinations& destinations, Stream stream) const = 0;
  virtual void limit_rows(const RowLimits& limits, Stream stream) const = 0;
  virtual void pack_rows(const RowPacking& packing, Stream stream) const = 0;
  /// rows (n, num_ranks) i32: rows[i, r] = r * stride + i.
  virtual void number_parts(const TensorView& rows, std::int64_t stride, Stream stream) const = 0;
  /// Returns how many expert rows each `rows_of_source[s]` rows in turn have, in `counts`. Waits.
  virtual void expand_slots(const SlotExpansion& expansion,
                            std::span<const std::int64_t> rows_of_source,
                            std::span<std::int64_t> counts, Stream stream) const = 0;
  /// Numbers the rows that come back for the slots: those of rank r begin behind those of the ranks
  /// before it, in slot order. `counts`: of every rank. Waits.
  virtual void number_slots(const SlotNumbers& numbers, std::span<std::int64_t> counts,
                            Stream stream) const = 0;

  /// target = rnd(target + scale * source) in fp32.
  virtual void add(const AddArgs& args) const = 0;
};

}  // namespace fusedmoe::core
