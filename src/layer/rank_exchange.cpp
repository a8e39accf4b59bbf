// One step across ranks. In order: find destinations (which token goes where), count (headers and
// numbers of rows, for which the host waits) and settle (which of them fit; per slot the host
// waits), both in rank_exchange_counts.cpp, pack, exchange rows; then, behind the experts, return
// and sum. What packs and sums is in rank_exchange_host.cpp and rank_exchange_device.cpp. Ranks
// that lend each other their memory have one step for count, pack and exchange, and return nothing.
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
#include "layer/step_name.h"
#include "moe/experts_args.h"

namespace fusedmoe::layer {

Message message(int peer, const TensorView& rows, std::int64_t begin, std::int64_t count) {
  const TensorView part = rows.slice(0, begin, begin + count);
  return {peer, part.data(), static_cast<std::size_t>(part.nbytes())};
}

void put_in_send_order(const RowTensors& from, const RowTensors& to, const TensorView& tokens,
                       const TensorView& counts, std::span<const core::RowPacking::Part> parts,
                       Stream stream) {
  std::vector<core::RowPacking::Tensor> tensors;
  to.each(from, [&](const TensorView& target, const TensorView& source) {
    tensors.push_back({source, target});
  });
  backend_of(stream.device).pack_rows({tensors, to.ids, tokens, counts, parts}, stream);
}

std::int64_t RankExchange::Step::recv_begin(int rank) const {
  return std::accumulate(recv_counts.begin(), recv_counts.begin() + rank, std::int64_t{0});
}

std::string RankExchange::what(std::string_view phase) const {
  return StepName{step_.number, layer_, step_.recorded}.of(phase);
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
  step_.recorded = is_capturing(args.stream);
  if (shared_) {
    step_.shared = group_->take_shared(layout_bytes(core::callers_problem(args), args.preparation));
  }
  const ExchangeLayout layout = this->layout(args);
  num_logits_ > 0 ? route_own(args) : find_destinations(args, layout);
  ForwardArgs own = args;  // the caller's views stay until finish_prepare, which needs their sizes
  layout.own.run(own);
  const RowTensors rows = own_rows(own, layout);
  if (in_place_) {
    if (fixed_sizes_) set_fixed_counts(layout);
    receive_in_place(rows, layout, args.stream);
    settle(args, layout);  // what the others have just read may change now
  } else if (host_) {
    count(args, layout);
    pack_on_host(rows, layout, args.stream);
    if (unpacked_) exchange_unpacked(rows, layout, args.stream);
  } else {
    prepare_on_device(args, rows, layout);
  }
  args.hidden_scales = own.hidden_scales;
}

/// True if nobody needs the tokens' destinations: physical experts have the logical numbers, and
/// every row goes to every rank.
bool RankExchange::keeps_ids() const {
  return !host_ && ids_stay_ && to_all_ && !drop_rows_ && !per_slot();
}

void RankExchange::find_destinations(const ForwardArgs& args, const ExchangeLayout& layout) const {
  if (keeps_ids()) return;
  core::TokenDestinations destinations;
  destinations.topk_ids = args.topk_ids;
  destinations.replica_offsets = replica_offsets_;
  destinations.replicas = replicas_;
  destinations.physical_ranks = physical_ranks_;
  destinations.nearest_rank = nearest_rank_;
  destinations.row_stride = layout.sizes.max_tokens;
  destinations.physical_ids = layout.physical_ids;
  if (host_ || !to_all_) {
    destinations.send_rows = layout.send_rows;
    destinations.send_counts = layout.send_counts;
    destinations.send_tokens = layout.send_tokens;
  }
  const core::Backend& backend = backend_of(args.stream.device);
  backend.find_destinations(destinations, args.stream);
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
  tokens.ids = keeps_ids() ? own.topk_ids : layout.physical_ids;
  tokens.weights = own.topk_weights;
  if (hooks_) tokens.numbers = layout.own_rows;
  if (num_logits_ > 0) tokens.logits = own.router_logits;
  if (layout.received.scales) tokens.scales = own.hidden_scales;
  if (hooks_ || layout.row_scales) backend.number_parts(layout.own_rows, 0, own.stream);
  if (layout.row_scales) {
    const TensorView every_row = layout.own_rows.reshape({1, layout.sizes.num_tokens});
    backend.copy_to_slots(every_row, own.hidden_scales, layout.row_scales, own.stream);
    tokens.scales = layout.row_scales;
  }
  return tokens;
}

/// This rank's own rows, put among those received at once. A rank without experts keeps them there,
/// too, if all ranks get the same.
RankExchange::Parts RankExchange::own_part() const {
  const std::int64_t rows = to_all_ ? rows_for_all() : step_.send_counts[rank_];
  return {{rank_, 0, rows, step_.recv_begin(rank_)}};
}

/// Where all ranks get the same rows, they get this rank's own.
RankExchange::Parts RankExchange::parts_of_others(const ExchangeLayout& layout) const {
  Parts parts;
  for (int r = 0; !to_all_ && r < size_; ++r) {
    if (r != rank_) parts.push_back({r, 0, step_.send_counts[r], layout.packed_begin(r)});
  }
  return parts;
}

void RankExchange::exchange_rows(const ExchangeLayout& layout, Stream stream) const {
  std::vector<Message> sends, receives;
  const bool in_place = static_cast<bool>(step_.own.values);
  const auto add = [&](std::vector<Message>& messages, int peer, const RowTensors& rows,
                       std::int64_t begin, std::int64_t count) {
    layout.rows.each(rows, [&](const TensorView&, const TensorView& tensor) {
      messages.push_back(message(peer, tensor, begin, count));
    });
  };
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const std::int64_t packed = to_all_ ? step_.recv_begin(rank_) : layout.packed_begin(r);
    add(sends, r, in_place ? step_.own : layout.rows, in_place ? 0 : packed, step_.send_counts[r]);
    add(receives, r, layout.rows, step_.recv_begin(r), step_.recv_counts[r]);
  }
  group_->exchange(sends, receives, stream, what("dispatch"));
}

void RankExchange::do_finish_prepare(ForwardArgs& args) const {
  const ExchangeLayout layout = this->layout(args);
  if (!host_) {
    exchange_on_device(layout, args.stream);
  } else if (!in_place_ && !unpacked_) {
    exchange_rows(layout, args.stream);
  }
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
  expansion.counts = layout.slot_counts;
  backend.expand_slots(expansion, step_.recv_counts, step_.slots_in, args.stream);
  const std::int64_t rows =
      std::accumulate(step_.slots_in.begin(), step_.slots_in.end(), std::int64_t{0});
  const auto expand = [&](TensorView& view, const TensorView& expanded) {
    backend.copy_to_slots(expansion.slot_rows, view, expanded, args.stream);
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
  if (in_place_) return;
  const ExchangeLayout layout = this->layout(args);
  if (per_slot()) {
    return_slots(args, layout);
  } else if (host_) {
    return_rows(args, layout);
  } else {
    return_on_device(args, layout);
  }
}

void RankExchange::do_finish_finalize(const ForwardArgs& args) const {
  const ExchangeLayout layout = this->layout(args);
  if (in_place_) {
    sum_in_place(args, layout);
  } else if (host_) {
    sum_messages(args, layout);
  } else {
    sum_on_device(args, layout);
  }
  if (sums_.needed()) {
    sums_.run(layout.partial, args.output, args.accumulate, *layout.sums, args.stream, what("sum"));
  }
  end_step();
}

/// Where the rows that a rank has computed for this one come back to.
std::int64_t RankExchange::returned_begin(const ExchangeLayout& layout, int rank) const {
  const auto place = std::find(owners_.begin(), owners_.end(), rank) - owners_.begin();
  return (to_all_ ? place : rank) * layout.sizes.max_tokens;
}

/// A rank's own rows stay where its experts have left them.
void RankExchange::return_rows(const ForwardArgs& args, const ExchangeLayout& layout) const {
  std::vector<Message> sends, receives;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    sends.push_back(message(r, args.fused_output, step_.recv_begin(r), step_.recv_counts[r]));
    if (step_.send_counts[r] == 0) continue;
    receives.push_back(
        message(r, layout.returned, returned_begin(layout, r), step_.send_counts[r]));
  }
  group_->exchange(sends, receives, args.stream, what("combine"));
}

/// The same for rows of slots.
void RankExchange::return_slots(const ForwardArgs& args, const ExchangeLayout& layout) const {
  std::vector<Message> sends, receives;
  std::int64_t sent = 0, back = 0;
  for (int r = 0; r < size_; ++r) {
    if (r != rank_) {
      sends.push_back(message(r, args.fused_output, sent, step_.slots_in[r]));
      receives.push_back(message(r, layout.returned, back, step_.slots_out[r]));
    }
    sent += step_.slots_in[r];
    back += step_.slots_out[r];
  }
  group_->exchange(sends, receives, args.stream, what("combine"));
}

}  // namespace fusedmoe::layer
