// What the steps of the CPU share: where rows lie, and the sums of rows wherever they lie.
#include <algorithm>
#include <numeric>

#include "layer/rank_step.h"
#include "moe/local_experts.h"

namespace fusedmoe::layer {

/// Where the experts find received rows that were copied.
void RankStep::locate_received() const {
  const TensorView& values = received_.values;
  const std::int64_t row_bytes = fusedmoe::bytes(values.dtype(), values.stride(0));
  for (std::int64_t row = 0; row < rows_; ++row) {
    received_at_[row] = values.as<const std::byte>() + row * row_bytes;
  }
}

/// And those of `rank` that stay where it has them, in `values`: the first `filled` are those of
/// `tokens` (null: of all), the others are nobody's.
void RankStep::locate_kept(const TensorView& values, const std::int32_t* tokens,
                           std::int64_t filled, int rank) const {
  const std::byte** next = received_at_ + recv_begin(rank);
  for (std::int64_t i = 0; i < recv_counts_[rank]; ++i) {
    *next++ = nullptr;
    if (i >= filled) continue;
    const std::int64_t row = tokens ? tokens[i] : i;
    next[-1] =
        values.as<const std::byte>() + fusedmoe::bytes(values.dtype(), row * values.stride(0));
  }
}

std::int64_t RankStep::local_slots(const ForwardArgs& args) const {
  const core::LocalExperts local_expert(args.expert_map, rules_.num_local_experts);
  const std::span ids(args.topk_ids.as<const std::int32_t>(),
                      static_cast<std::size_t>(args.topk_ids.numel()));
  return std::count_if(ids.begin(), ids.end(),
                       [&](std::int32_t id) { return local_expert(id) >= 0; });
}

/// output = the sums of the rows for each token, in rank or slot order. `first`: of the rows that
/// each rank has for this one.
void RankStep::sum_rows(const ForwardArgs& args, std::span<const std::byte* const> first) const {
  const std::int64_t row_bytes = fusedmoe::bytes(rules_.combine_dtype, sizes_.hidden);
  const std::int64_t num_tokens = sizes_.num_tokens, topk = sizes_.topk;
  const int size = rules_.size;
  const bool per_slot = rules_.per_slot();
  const auto* send_rows = send_rows_.as<const std::int32_t>();
  const auto* physical = physical_ids_.as<const std::int32_t>();
  const auto* ranks = rules_.physical_ranks.as<const std::int32_t>();
  const auto* slot_rows = returned_slots_.as<const std::int32_t>();
  Counts slots_before(slots_out_.size());
  std::exclusive_scan(slots_out_.begin(), slots_out_.end(), slots_before.begin(), std::int64_t{0});
  const std::byte** next = row_addresses_;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (std::int64_t slot = token * topk; per_slot && slot < (token + 1) * topk; ++slot) {
      const std::int32_t rank = slot_rows[slot] < 0 ? 0 : ranks[physical[slot]];
      *next++ = slot_rows[slot] < 0
                    ? nullptr
                    : first[rank] + (slot_rows[slot] - slots_before[rank]) * row_bytes;
    }
    for (int r = 0; !per_slot && r < size; ++r) {
      const std::int32_t row = send_rows[token * size + r];
      const bool comes = sizes_.to_all ? token < send_counts_[r] : row >= 0;
      const std::int64_t number = sizes_.to_all ? token : row - r * sizes_.max_tokens;
      *next++ = comes ? first[r] + number * row_bytes : nullptr;
    }
  }
  core::ReduceArgs reduce = reduce_args(args);
  reduce.row_addresses = row_addresses_;
  reduce.rows_per_token = per_slot ? topk : size;
  backend().reduce(reduce, {});
}

}  // namespace fusedmoe::layer
