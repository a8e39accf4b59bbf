// The steps of RankExchange on CUDA. Rows for other ranks are packed; this rank's own go straight
// to where its experts read them, and are added up where its experts have left them. Rows that go
// to all ranks are sent from where they are, if this rank has as many tokens as it sends rows.
#include <numeric>

#include "fusedmoe/runtime.h"
#include "layer/backend.h"
#include "layer/rank_exchange.h"

namespace fusedmoe::layer {
/// Whether the data plane's own collectives serve: the same number of rows from and to every rank.
bool RankExchange::gathers() const {
  return to_all_ && fixed_sizes_ && !per_slot() && static_cast<int>(owners_.size()) == size_ &&
         group_->has_collectives();
}

/// Whether this rank has a token for each row that it sends to all.
bool RankExchange::fills_all(const ExchangeLayout& layout) const {
  return layout.sizes.num_tokens == rows_for_all();
}

void RankExchange::prepare_on_device(const ForwardArgs& args, const RowTensors& rows,
                                     const ExchangeLayout& layout) const {
  count(args, layout);
  step_.own = {};
  if (to_all_ && fills_all(layout) && rows.values.contiguous()) {
    step_.own = rows;
  }
  if (step_.own.values && gathers()) return;
  Parts parts = own_part();
  const Parts others = parts_of_others(layout);
  parts.insert(parts.end(), others.begin(), others.end());
  put_in_send_order(rows, layout.rows, to_all_ ? TensorView() : layout.send_tokens,
                    to_all_ ? TensorView() : layout.send_counts, parts, args.stream);
}

/// Rows that go to all, taken from where they are.
void RankExchange::gather_rows(const ExchangeLayout& layout, Stream stream) const {
  std::vector<Gather> buffers;
  const RowTensors& own = step_.own.values ? step_.own : layout.received;
  layout.received.each(own, [&](const TensorView& rows, const TensorView& mine) {
    const auto bytes = static_cast<std::size_t>(rows.slice(0, 0, rows_for_all()).nbytes());
    buffers.push_back({rows.data(), bytes, step_.own.values ? mine.data() : nullptr});
  });
  group_->all_gather(buffers, stream, what("dispatch"));
}

void RankExchange::exchange_on_device(const ExchangeLayout& layout, Stream stream) const {
  if (gathers()) return gather_rows(layout, stream);
  exchange_rows(layout, stream);
}

void RankExchange::return_on_device(const ForwardArgs& args, const ExchangeLayout& layout) const {
  step_.scattered = allgather_ && gathers();
  if (!step_.scattered) return return_rows(args, layout);
  TensorView sums = layout.returned;
  if (sums_into_output(args, layout)) sums = args.output;
  group_->reduce_scatter(args.fused_output.data(), sums.data(),
                         rows_for_all() * layout.sizes.hidden, combine_dtype_, args.stream,
                         what("combine"));
}

/// Whether the data plane's sums over ranks are the output: nothing is left to be added or
/// converted.
bool RankExchange::sums_into_output(const ForwardArgs& args, const ExchangeLayout& layout) const {
  return fills_all(layout) && !sums_.needed() && !args.accumulate &&
         args.output.dtype() == combine_dtype_ && args.output.contiguous();
}

void RankExchange::sum_on_device(const ForwardArgs& args, const ExchangeLayout& layout) const {
  if (step_.scattered && sums_into_output(args, layout)) return;
  const core::Backend& backend = backend_of(args.stream.device);
  core::ReduceArgs reduce;
  reduce.fused_output = layout.returned;
  const auto stays = [&](std::int64_t begin, std::int64_t first, std::int64_t count) {
    reduce.elsewhere = args.fused_output.slice(0, first, first + count);
    reduce.elsewhere_begin = begin;
    reduce.elsewhere_end = begin + count;
  };
  TensorView numbers = layout.send_rows;
  if (per_slot()) {
    const auto before = [&](const std::vector<std::int64_t>& slots) {
      return std::accumulate(slots.begin(), slots.begin() + rank_, std::int64_t{0});
    };
    numbers = layout.returned_slots;
    stays(before(step_.slots_out), before(step_.slots_in), step_.slots_in[rank_]);
  } else {
    if (to_all_) numbers = number_all(layout, args.stream);
    if (!step_.scattered) {
      stays(returned_begin(layout, rank_), step_.recv_begin(rank_), step_.recv_counts[rank_]);
    }
  }
  reduce.router_weight_on_input = !per_slot() || args.preparation.apply_router_weight_on_input;
  reduce.accumulate = args.accumulate && !sums_.needed();
  reduce.fused_multiply_add = per_slot();
  reduce.follows_kernel = false;
  reduce.stream = args.stream;
  reduce.output = sums_.needed() ? layout.partial : args.output;
  reduce.topk_ids = numbers;
  reduce.topk_weights = args.topk_weights;
  backend.reduce(reduce, numbers);
}

/// The rows of each token where all ranks got all tokens, or one row where they are added already.
TensorView RankExchange::number_all(const ExchangeLayout& layout, Stream stream) const {
  const core::Backend& backend = backend_of(stream.device);
  const std::int64_t parts = step_.scattered ? 1 : static_cast<std::int64_t>(owners_.size());
  const TensorView numbers(layout.send_rows.data(), DType::kI32, {layout.sizes.num_tokens, parts},
                           stream.device);
  backend.number_parts(numbers, layout.sizes.max_tokens, stream);
  const std::vector<std::int64_t> room(static_cast<std::size_t>(parts), rows_for_all());
  if (drop_rows_) {
    backend.limit_rows({numbers, layout.sizes.max_tokens, room, {}, {}, {}}, stream);
  }
  return numbers;
}

}  // namespace fusedmoe::layer
