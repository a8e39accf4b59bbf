// One step across ranks. In order: plan (which token goes where), count (headers and numbers of
// rows; on CUDA the only wait of the host) and settle (which of them fit), both in
// rank_exchange_counts.cpp, pack, exchange rows; then, behind the experts, return and sum. Ranks
// that lend each other their memory have one step for count, pack and exchange, and return nothing
// (rank_exchange_host.cpp).
//
// Received rows lie by (source rank, token), and everything is summed in rank or slot order, so
// that no bit depends on which rank was first.
#include "layer/rank_exchange.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "fusedmoe/runtime.h"
#include "layer/backend.h"
#include "moe/experts_args.h"

namespace fusedmoe::layer {

Message message(int peer, const TensorView& rows, std::int64_t begin, std::int64_t count) {
  const TensorView part = rows.slice(0, begin, begin + count);
  return {peer, part.data(), static_cast<std::size_t>(part.nbytes())};
}

std::int64_t RankExchange::Step::recv_begin(int rank) const {
  return std::accumulate(recv_counts.begin(), recv_counts.begin() + rank, std::int64_t{0});
}

std::string RankExchange::what(std::string_view phase) const {
  return core::format("{} of step {} of layer {}", phase, step_.number, layer_);
}

/// The step keeps its shared memory: another rank may still read it, and where two threads ran
/// forwards at the same time, the other one's forward still writes it.
void RankExchange::abandon(std::string_view reason) const noexcept {
  busy_.clear();
  group_->abort(reason);
}

void RankExchange::end_step() const noexcept {
  if (step_.shared) group_->give_back_shared(std::exchange(step_.shared, nullptr));
  busy_.clear();
}

/// Messages to the own rank are copies.
void RankExchange::swap(std::span<const Message> sends, std::span<const Message> receives,
                        Stream stream, std::string_view phase) const {
  std::vector<Message> out, in, mine;
  for (const Message& each : sends) (each.peer == rank_ ? mine : out).push_back(each);
  std::size_t next = 0;
  for (const Message& each : receives) {
    if (each.peer != rank_) {
      in.push_back(each);
      continue;
    }
    const Message& source = mine[next++];
    if (source.data == each.data || each.bytes == 0) continue;
    const Shape shape{static_cast<std::int64_t>(each.bytes)};
    copy(TensorView(source.data, DType::kU8, shape, stream.device),
         TensorView(each.data, DType::kU8, shape, stream.device), stream);
  }
  group_->exchange(out, in, stream, what(phase));
}

void RankExchange::do_start_prepare(ForwardArgs& args) const {
  if (busy_.test_and_set()) {
    throw Error::communication("a layer across ranks runs one forward at a time");
  }
  const std::int64_t num_tokens = args.hidden_states.size(0);
  const std::int64_t most = std::max(args.max_tokens, num_tokens);
  FUSEDMOE_CHECK_FAULT(max_tokens_per_rank_ == 0 || most <= max_tokens_per_rank_, kShape,
                       "hidden_states", core::format("{} tokens", most),
                       core::format("at most max_tokens_per_rank, {}", max_tokens_per_rank_));
  step_.number = group_->next_step();
  if (shared_) {
    step_.shared = group_->take_shared(layout_bytes(problem_of(args), args.preparation));
  }
  const ExchangeLayout layout = this->layout(args);
  num_logits_ > 0 ? route_own(args) : plan(args, layout);
  ForwardArgs own = args;  // the caller's views stay until finish_prepare, which needs their sizes
  if (fixed_sizes_) {
    set_fixed_counts(layout);
  } else if (!in_place_) {
    count(args, layout);
  }
  if (!in_place_) {
    check_received();
    settle(args, layout);
  }
  layout.own.run(own);
  const RowTensors rows = own_rows(own, layout);
  if (in_place_) {
    receive_in_place(rows, layout, args.stream);
    settle(args, layout);  // what the others have just read may change now
  } else if (host_) {
    pack_on_host(rows, layout, args.stream);
    if (unpacked_) exchange_unpacked(rows, layout, args.stream);
  } else {
    pack(rows, layout, args.stream);
  }
  args.hidden_scales = own.hidden_scales;
}

void RankExchange::plan(const ForwardArgs& args, const ExchangeLayout& layout) const {
  core::DispatchPlan plan;
  plan.topk_ids = args.topk_ids;
  plan.replica_offsets = replica_offsets_;
  plan.replicas = replicas_;
  plan.physical_ranks = physical_ranks_;
  plan.nearest_rank = nearest_rank_;
  plan.row_stride = layout.sizes.max_tokens;
  plan.physical_ids = layout.physical_ids;
  plan.send_rows = layout.send_rows;
  plan.send_counts = layout.send_counts;
  plan.send_tokens = layout.send_tokens;
  const core::Backend& backend = backend_of(args.stream.device);
  backend.plan_dispatch(plan, args.stream);
}

/// The caller's results, and the load, are of this rank's tokens alone. The experts route those of
/// all ranks.
void RankExchange::route_own(ForwardArgs& args) const {
  backend_of(args.stream.device)
      .route(*args.router, args.router_logits, args.score_correction_bias,
             {args.topk_ids, args.topk_weights}, args.expert_load, args.stream);
  args.expert_load = {};
}

/// Values, scales, ids and weights of this rank's tokens, one of each in every row.
RowTensors RankExchange::own_rows(const ForwardArgs& own, const ExchangeLayout& layout) const {
  const core::Backend& backend = backend_of(own.stream.device);
  RowTensors tokens;
  tokens.values = own.hidden_states;
  tokens.ids = layout.physical_ids;
  tokens.weights = own.topk_weights;
  if (hooks_) tokens.numbers = layout.own_rows;
  if (num_logits_ > 0) tokens.logits = own.router_logits;
  if (layout.received.scales) tokens.scales = own.hidden_scales;
  if (layout.own_rows) backend.number_parts(layout.own_rows, 0, own.stream);
  if (layout.row_scales) {
    const TensorView every_row = layout.own_rows.reshape({1, layout.sizes.num_tokens});
    backend.dispatch(every_row, own.hidden_scales, layout.row_scales, own.stream);
    tokens.scales = layout.row_scales;
  }
  return tokens;
}

/// Puts the rows where exchange_rows() takes them from.
void RankExchange::pack(const RowTensors& rows, const ExchangeLayout& layout, Stream stream) const {
  const core::Backend& backend = backend_of(stream.device);
  RowTensors target = layout.packed;
  if (to_all_) {
    // At once where they lie among the rows of all ranks.
    const std::int64_t begin = step_.recv_begin(rank_);
    target = layout.received.slice(begin, begin + rows_for_all());
  }
  const std::int64_t tokens =
      to_all_ ? std::min(layout.sizes.num_tokens, rows_for_all()) : layout.sizes.num_tokens;
  const TensorView& numbers = to_all_ ? layout.own_rows : layout.send_rows;
  if (fixed_sizes_) fill_bytes(target.ids, 0xff, stream);  // -1 in rows that nobody fills
  target.each(rows, [&](const TensorView& to, const TensorView& from) {
    backend.dispatch(numbers.slice(0, 0, tokens), from.slice(0, 0, tokens), to, stream);
  });
}

/// Whether the data plane's own collectives serve: the same number of rows from and to every rank.
bool RankExchange::gather_and_scatter() const {
  return !host_ && to_all_ && fixed_sizes_ && whole_ && !per_slot() &&
         static_cast<int>(owners_.size()) == size_;
}

void RankExchange::exchange_rows(const ExchangeLayout& layout, Stream stream) const {
  const RowTensors& all = layout.received;
  if (gather_and_scatter()) {
    std::vector<Gather> buffers;
    all.each(all, [&](const TensorView& rows, const TensorView&) {
      const auto bytes = static_cast<std::size_t>(rows.slice(0, 0, step_.rows).nbytes());
      buffers.push_back({rows.data(), bytes / static_cast<std::size_t>(size_)});
    });
    if (group_->all_gather(buffers, stream)) return;
  }
  std::vector<Message> sends, receives;
  const RowTensors& source = to_all_ ? all : layout.packed;
  for (int r = 0; r < size_; ++r) {
    if (host_ && r == rank_) continue;  // packed there at once
    const std::int64_t from = to_all_ ? step_.recv_begin(rank_) : r * layout.sizes.max_tokens;
    const std::int64_t to = step_.recv_begin(r);
    source.each(all, [&](const TensorView& out, const TensorView& in) {
      sends.push_back(message(r, out, from, step_.send_counts[r]));
      receives.push_back(message(r, in, to, step_.recv_counts[r]));
    });
  }
  swap(sends, receives, stream, "dispatch");
}

void RankExchange::do_finish_prepare(ForwardArgs& args) const {
  const ExchangeLayout layout = this->layout(args);
  if (!in_place_ && !unpacked_) exchange_rows(layout, args.stream);
  const auto arrived = [&](const TensorView& all) { return all.slice(0, 0, step_.rows); };
  args.hidden_states = arrived(layout.received.values);
  args.row_addresses = layout.received_at;
  args.output_memory = layout.output.data();
  if (hooks_) tell_origins(args, arrived(layout.received.numbers), step_.recv_counts);
  if (layout.received.scales) args.hidden_scales = arrived(layout.received.scales);
  if (layout.sizes.converts) convert(args, layout);
  if (num_logits_ > 0) {
    args.router_logits = arrived(layout.received.logits);
    args.topk_ids = arrived(layout.routed.topk_ids);
    args.topk_weights = arrived(layout.routed.topk_weights);
  } else {
    args.topk_ids = arrived(layout.received.ids);
    args.topk_weights = arrived(layout.received.weights);
  }
  args.expert_map = expert_map_;
  // Gathered rows choose among all experts: their share of local ones is for the experts to know.
  if (!to_all_) {
    args.expected_rows = expected_local_slots(step_.rows, args.topk_ids.size(1), local_share_);
  }
  if (per_slot()) expand_slots(args, layout);
}

/// Rows as they have travelled become rows as the experts read them: quantized, or no longer so.
void RankExchange::convert(ForwardArgs& args, const ExchangeLayout& layout) const {
  const core::Backend& backend = backend_of(args.stream.device);
  const TensorView values = layout.read_values.slice(0, 0, step_.rows);
  const std::optional<QuantKey>& read = args.preparation.quant;
  if (!read) {
    backend.dequantize(args.hidden_states, args.hidden_scales, *activations_, values, args.stream);
    args.hidden_states = values;
    args.hidden_scales = {};
    return;
  }
  const TensorView scales =
      read->group.rows == 1 ? layout.read_scales.slice(0, 0, step_.rows) : layout.read_scales;
  backend.quantize(args.hidden_states, *read, args.preparation.scale, values, scales, args.stream);
  args.hidden_states = values;
  args.hidden_scales = scales;
}

/// A row for each slot that names an expert of this rank, with weight 1: what the experts then
/// leave are their rows themselves.
void RankExchange::expand_slots(ForwardArgs& args, const ExchangeLayout& layout) const {
  const core::Backend& backend = backend_of(args.stream.device);
  core::SlotExpansion expansion;
  expansion.ids = args.topk_ids;
  expansion.expert_map = args.expert_map;
  expansion.slot_rows = layout.slot_rows.slice(0, 0, step_.rows);
  expansion.row_ids = layout.expert_rows.ids;
  expansion.row_weights = layout.expert_rows.weights;
  expansion.counts = layout.recv_counts.slice(0, 0, size_);
  backend.expand_slots(expansion, step_.recv_counts, step_.slots_in, args.stream);
  const std::int64_t rows =
      std::accumulate(step_.slots_in.begin(), step_.slots_in.end(), std::int64_t{0});
  const auto expand = [&](TensorView& view, const TensorView& expanded) {
    backend.dispatch(expansion.slot_rows, view, expanded, args.stream);
    view = expanded.slice(0, 0, rows);
  };
  if (layout.expert_rows_at) {
    locate_slots(args, layout, rows);
  } else {
    expand(args.hidden_states, layout.expert_rows.values);
  }
  if (layout.expert_rows.scales) expand(args.hidden_scales, layout.expert_rows.scales);
  if (hooks_) {
    TensorView numbers = args.origins.numbers;
    expand(numbers, layout.expert_rows.numbers);
    tell_origins(args, numbers, step_.slots_in);
  }
  args.expected_rows = rows;
  args.topk_ids = expansion.row_ids.slice(0, 0, rows);
  args.topk_weights = expansion.row_weights.slice(0, 0, rows);
}

/// `counts`: of each rank of the group. Its ranks are in ascending order, as the rows are.
void RankExchange::tell_origins(ForwardArgs& args, const TensorView& numbers,
                                std::span<const std::int64_t> counts) const {
  for (int r = 0; r < size_; ++r) step_.origins[members_[r]] = counts[r];
  args.origins = {numbers, step_.origins};
}

void RankExchange::do_start_finalize(const ForwardArgs& args) const {
  if (!in_place_) return_rows(args, layout(args));
}

void RankExchange::do_finish_finalize(const ForwardArgs& args) const {
  const ExchangeLayout layout = this->layout(args);
  if (in_place_) {
    sum_in_place(args, layout);
  } else if (host_) {
    sum_messages(args, layout);
  } else {
    sum(args, layout);
  }
  if (sums_.needed()) {
    sums_.run(layout.partial, args.output, args.accumulate, *layout.sums, args.stream, what("sum"));
  }
  end_step();
}

void RankExchange::return_rows(const ForwardArgs& args, const ExchangeLayout& layout) const {
  const TensorView& rows = args.fused_output;
  const std::int64_t most = layout.sizes.max_tokens;
  if (gather_and_scatter() &&
      group_->reduce_scatter(rows.data(), layout.returned.data(),
                             rows_for_all() * layout.sizes.hidden, combine_dtype_, args.stream)) {
    step_.scattered = true;
    return;
  }
  step_.scattered = false;
  std::vector<Message> sends, receives;
  std::int64_t slots_sent = 0, slots_back = 0;
  for (int r = 0; r < size_; ++r) {
    const bool stays = host_ && r == rank_;  // summed where the experts wrote it
    if (per_slot()) {
      if (!stays) {
        sends.push_back(message(r, rows, slots_sent, step_.slots_in[r]));
        receives.push_back(message(r, layout.returned, slots_back, step_.slots_out[r]));
      }
      slots_sent += step_.slots_in[r];
      slots_back += step_.slots_out[r];
      continue;
    }
    if (stays) continue;
    sends.push_back(message(r, rows, step_.recv_begin(r), step_.recv_counts[r]));
    if (step_.send_counts[r] == 0) continue;
    const auto place = std::find(owners_.begin(), owners_.end(), r) - owners_.begin();
    receives.push_back(
        message(r, layout.returned, (to_all_ ? place : r) * most, step_.send_counts[r]));
  }
  swap(sends, receives, args.stream, "combine");
}

/// On CUDA.
void RankExchange::sum(const ForwardArgs& args, const ExchangeLayout& layout) const {
  const core::Backend& backend = backend_of(args.stream.device);
  const std::int64_t num_tokens = layout.sizes.num_tokens;
  TensorView numbers = layout.send_rows;
  if (per_slot()) {
    numbers = layout.returned_slots;
  } else if (to_all_) {
    const std::int64_t parts = step_.scattered ? 1 : static_cast<std::int64_t>(owners_.size());
    numbers = TensorView(numbers.data(), DType::kI32, {num_tokens, parts}, args.stream.device);
    backend.number_parts(numbers, layout.sizes.max_tokens, args.stream);
    const std::vector<std::int64_t> room(static_cast<std::size_t>(parts), rows_for_all());
    if (drop_rows_) {
      backend.limit_rows({numbers, layout.sizes.max_tokens, room, {}, {}, {}}, args.stream);
    }
  }
  core::ReduceArgs reduce;
  reduce.output = sums_.needed() ? layout.partial : args.output;
  reduce.fused_output = layout.returned;
  reduce.topk_ids = numbers;
  reduce.topk_weights = args.topk_weights;
  reduce.router_weight_on_input = !per_slot() || args.preparation.apply_router_weight_on_input;
  reduce.accumulate = args.accumulate && !sums_.needed();
  reduce.fused_multiply_add = per_slot();
  reduce.follows_kernel = false;
  reduce.stream = args.stream;
  backend.reduce(reduce, numbers);
}

}  // namespace fusedmoe::layer
