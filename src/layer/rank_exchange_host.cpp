// The steps of RankExchange on the CPU. A row is copied once on its way to the experts of a rank,
// or packed first where the data plane takes only whole messages. Sums read rows where they lie:
// those of threads of this process in their memory, those of processes of this host in shared
// memory, others where messages have brought them.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/copy_rows.h"
#include "core/parallel.h"
#include "host/element.h"
#include "layer/backend.h"
#include "layer/rank_exchange.h"

namespace fusedmoe::layer {
namespace {

using core::copy_rows;
using core::run_of;

/// Adds the rows from `begin` on to `messages`: one for all if nothing lies between them.
void add_rows(std::vector<Message>& messages, int peer, const TensorView& rows, std::int64_t begin,
              std::int64_t count) {
  const std::int64_t row_bytes = bytes(rows.dtype(), rows.size(1));
  const std::int64_t stride_bytes = bytes(rows.dtype(), rows.stride(0));
  const bool together = stride_bytes == row_bytes;
  for (std::int64_t row = begin; row < begin + count; row += together ? count : 1) {
    messages.push_back({peer, rows.as<std::byte>() + row * stride_bytes,
                        static_cast<std::size_t>(row_bytes * (together ? count : 1))});
  }
}

std::vector<std::int64_t> begins_of(std::span<const std::int64_t> counts) {
  std::vector<std::int64_t> begins(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), std::int64_t{0});
  return begins;
}

}  // namespace

/// What the others read of these rows.
LentRows RankExchange::lent(const RowTensors& rows, const ExchangeLayout& layout) const {
  return {header(layout), layout.send_counts, to_all_ ? TensorView() : layout.send_tokens, rows};
}

/// Where the experts find received rows.
void RankExchange::locate_received(const ExchangeLayout& layout) const {
  const TensorView& values = layout.received.values;
  const std::int64_t row_bytes = bytes(values.dtype(), values.stride(0));
  for (std::int64_t row = 0; row < step_.rows; ++row) {
    layout.received_at[row] = values.as<const std::byte>() + row * row_bytes;
  }
}

/// And those that stay where a rank has them: this rank's own, and all in shared memory.
void RankExchange::locate_lent(int rank, const LentRows& lent, const ExchangeLayout& layout) const {
  const TensorView& values = lent.rows.values;
  const auto* tokens = lent.tokens.as<const std::int32_t>();
  if (tokens) tokens += rank_ * lent.tokens.size(1);
  const std::byte** next = layout.received_at + step_.recv_begin(rank);
  for (std::int64_t i = 0; i < step_.recv_counts[rank]; ++i) {
    *next++ = nullptr;
    if (i >= lent.counts.as<const std::int32_t>()[rank_]) continue;
    const std::int64_t row = tokens ? tokens[i] : i;
    next[-1] = values.as<const std::byte>() + bytes(values.dtype(), row * values.stride(0));
  }
}

/// The same for the rows of slots. The hidden states are then no more than a shape.
void RankExchange::locate_slots(ForwardArgs& args, const ExchangeLayout& layout,
                                std::int64_t rows) const {
  const auto* slot_rows = layout.slot_rows.as<const std::int32_t>();
  const std::int64_t topk = layout.sizes.topk;
  for (std::int64_t slot = 0; slot < step_.rows * topk; ++slot) {
    if (slot_rows[slot] < 0) continue;
    layout.expert_rows_at[slot_rows[slot]] = layout.received_at[slot / topk];
  }
  args.row_addresses = layout.expert_rows_at;
  args.hidden_states = TensorView(args.hidden_states.data(), args.hidden_states.dtype(),
                                  {rows, args.hidden_states.size(1)});
}

/// The rows as others read them: in shared memory, where a copy of what the caller has is made.
/// Tokens that no other rank wants are left out.
RowTensors RankExchange::publish(const RowTensors& rows, const ExchangeLayout& layout,
                                 Stream stream) const {
  RowTensors result = rows;
  const auto publish_all = [&](TensorView& view, const TensorView& place) {
    if (!view) return;
    copy(view, place, stream);
    view = place;
  };
  publish_all(result.weights, layout.published.weights);
  publish_all(result.logits, layout.published.logits);
  if (!layout.published.values) return result;  // they have been made there
  result.values = layout.published.values;
  const auto* send_rows = layout.send_rows.as<const std::int32_t>();
  const auto wanted = [&](std::int64_t token) {
    bool by_some = to_all_;
    for (int r = 0; r < size_; ++r) by_some |= r != rank_ && send_rows[token * size_ + r] >= 0;
    return by_some;
  };
  const auto publish_values = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t stop = begin; begin < end; begin = ++stop) {
      while (stop < end && wanted(stop)) ++stop;
      copy_rows(rows.values, begin, result.values, begin, stop - begin);
    }
  };
  const bool worthwhile = rows.values.numel() >= core::kParallelElements;
  core::parallel_ranges(core::executor_of(stream), layout.sizes.num_tokens, worthwhile,
                        publish_values);
  return result;
}

/// Reads the rows for this rank where every rank has them: copies them, or only their addresses.
void RankExchange::receive_in_place(const RowTensors& rows, const ExchangeLayout& layout,
                                    Stream stream) const {
  if (to_all_) count_for_all(layout, layout.send_counts.as<std::int32_t>());
  const LentRows own = lent(rows, layout);
  *layout.lent_rows = shared_ ? lent(publish(rows, layout, stream), layout) : own;
  std::vector<StepHeader> headers;
  const auto fits = [&] { return receive_capacity_ == 0 || step_.rows <= receive_capacity_; };
  const auto read = [&](std::span<const void* const> lent) {
    std::vector<const LentRows*> all;
    for (const void* each : lent) all.push_back(static_cast<const LentRows*>(each));
    for (const LentRows* each : all) headers.push_back(each->header);
    if (std::count(headers.begin(), headers.end(), headers.front()) != size_) return;
    if (!fixed_sizes_) {
      set_counts([&](int from, int to) { return all[from]->counts.as<const std::int32_t>()[to]; });
    }
    step_.rows = step_.recv_begin(size_);
    if (!fits()) return;
    if (layout.received_at && !shared_) locate_received(layout);
    for (int r = 0; r < size_; ++r) {
      const LentRows& from = r == rank_ ? own : *all[r];
      RowTensors to = layout.received;
      if (layout.received_at && (shared_ || r == rank_)) {
        to.values = {};
        locate_lent(r, from, layout);
      }
      const core::RowPacking::Part part{rank_, 0, step_.recv_counts[r], step_.recv_begin(r)};
      put_in_send_order(from.rows, to, from.tokens, from.counts, {&part, 1}, stream);
    }
  };
  group_->lend("rows", layout.lent_rows, read, what("dispatch"));
  check_headers(headers);
  check_received();
}

/// Rows for other ranks where exchange_rows() takes them from, this rank's among those received.
void RankExchange::pack_on_host(const RowTensors& rows, const ExchangeLayout& layout,
                                Stream stream) const {
  const TensorView tokens = to_all_ ? TensorView() : layout.send_tokens;
  const TensorView counts = to_all_ ? TensorView() : layout.send_counts;
  RowTensors here = layout.received;
  if (layout.received_at) here.values = {};
  put_in_send_order(rows, here, tokens, counts, own_part(), stream);
  if (!unpacked_) {
    put_in_send_order(rows, layout.rows, tokens, counts, parts_of_others(layout), stream);
  }
  if (!layout.received_at) return;
  locate_received(layout);
  locate_lent(rank_, lent(rows, layout), layout);
}

/// Sends rows from where they lie: all values that a rank gets, then all scales, ids and weights.
void RankExchange::exchange_unpacked(const RowTensors& rows, const ExchangeLayout& layout,
                                     Stream stream) const {
  std::vector<Message> sends, receives;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const auto* tokens = layout.send_tokens.as<const std::int32_t>() + r * layout.sizes.max_tokens;
    const auto token_of = [&](std::int64_t i) { return tokens[i]; };
    const std::int64_t count = step_.send_counts[r];
    rows.each(layout.received, [&](const TensorView& from, const TensorView& to) {
      for (std::int64_t begin = 0, run = 0; begin < count; begin += run) {
        run = run_of(token_of, begin, count);
        add_rows(sends, r, from, tokens[begin], run);
      }
      add_rows(receives, r, to, step_.recv_begin(r), step_.recv_counts[r]);
    });
  }
  group_->exchange(sends, receives, stream, what("dispatch"));
}

/// Adds what all ranks have computed for the tokens of this one.
void RankExchange::sum_in_place(const ForwardArgs& args, const ExchangeLayout& layout) const {
  const TensorView& rows = args.fused_output;
  const bool elsewhere = shared_ && rows.data() != layout.output.data();
  if (elsewhere) copy(rows, layout.output.slice(0, 0, rows.size(0)), args.stream);
  const std::vector<std::int64_t>& counts = per_slot() ? step_.slots_in : step_.recv_counts;
  std::exclusive_scan(counts.begin(), counts.end(), layout.lent_begins, std::int64_t{0});
  const TensorView& there = elsewhere ? layout.output : rows;
  *layout.lent_sums = {there.as<const std::byte>(), layout.lent_begins};
  const std::int64_t row_bytes = bytes(combine_dtype_, layout.sizes.hidden);
  const auto add = [&](std::span<const void* const> lent) {
    std::vector<const std::byte*> first;
    for (const void* each : lent) {
      const auto& other = *static_cast<const LentSums*>(each);
      first.push_back(other.rows + other.begins[rank_] * row_bytes);
    }
    sum_rows(args, layout, first);
  };
  group_->lend("sums", layout.lent_sums, add, what("combine"));
}

/// The same with what return_rows() has brought; this rank's own rows are where they were.
void RankExchange::sum_messages(const ForwardArgs& args, const ExchangeLayout& layout) const {
  const std::int64_t row_bytes = bytes(combine_dtype_, layout.sizes.hidden);
  const std::vector<std::int64_t> slots_back = begins_of(step_.slots_out);
  const std::vector<std::int64_t> own = begins_of(per_slot() ? step_.slots_in : step_.recv_counts);
  std::vector<const std::byte*> first;
  for (int r = 0; r < size_; ++r) {
    const std::int64_t begin = per_slot() ? slots_back[r] : returned_begin(layout, r);
    const TensorView& rows = r == rank_ ? args.fused_output : layout.returned;
    first.push_back(rows.as<const std::byte>() + (r == rank_ ? own[r] : begin) * row_bytes);
  }
  sum_rows(args, layout, first);
}

/// output = the sums of the rows for each token, in rank or slot order. `first`: of the rows that
/// each rank has for this one.
void RankExchange::sum_rows(const ForwardArgs& args, const ExchangeLayout& layout,
                            std::span<const std::byte* const> first) const {
  const std::int64_t row_bytes = bytes(combine_dtype_, layout.sizes.hidden);
  const std::int64_t num_tokens = layout.sizes.num_tokens, topk = layout.sizes.topk;
  const auto* send_rows = layout.send_rows.as<const std::int32_t>();
  const auto* physical = layout.physical_ids.as<const std::int32_t>();
  const auto* ranks = physical_ranks_.as<const std::int32_t>();
  const auto* slot_rows = layout.returned_slots.as<const std::int32_t>();
  const std::vector<std::int64_t> slots_before = begins_of(step_.slots_out);
  const std::byte** next = layout.row_addresses;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (std::int64_t slot = token * topk; per_slot() && slot < (token + 1) * topk; ++slot) {
      const std::int32_t rank = slot_rows[slot] < 0 ? 0 : ranks[physical[slot]];
      *next++ = slot_rows[slot] < 0
                    ? nullptr
                    : first[rank] + (slot_rows[slot] - slots_before[rank]) * row_bytes;
    }
    for (int r = 0; !per_slot() && r < size_; ++r) {
      const std::int32_t row = send_rows[token * size_ + r];
      const bool comes = to_all_ ? token < step_.send_counts[r] : row >= 0;
      const std::int64_t number = to_all_ ? token : row - r * layout.sizes.max_tokens;
      *next++ = comes ? first[r] + number * row_bytes : nullptr;
    }
  }
  core::ReduceArgs reduce;
  reduce.output = sums_.needed() ? layout.partial : args.output;
  reduce.fused_output = args.fused_output;
  reduce.row_addresses = layout.row_addresses;
  reduce.rows_per_token = per_slot() ? topk : size_;
  reduce.topk_weights = args.topk_weights;
  reduce.router_weight_on_input = !per_slot() || args.preparation.apply_router_weight_on_input;
  reduce.accumulate = args.accumulate && !sums_.needed();
  reduce.stream = args.stream;
  backend_of(args.stream.device).reduce(reduce, {});
}

}  // namespace fusedmoe::layer
