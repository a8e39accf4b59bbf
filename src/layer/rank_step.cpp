#include "layer/rank_step.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "layer/backend.h"

namespace fusedmoe::layer {
namespace {

bool scale_of_each_rank(const Preparation& preparation) {
  return preparation.quant && preparation.quant->group.rows != 1 && preparation.quant->dynamic;
}

/// Values of rows, and scales where each row has its own (else no columns).
struct RowForm {
  DType values_dtype, scales_dtype = DType::kF32;
  std::int64_t value_columns, scale_columns = 0;

  RowForm(const Preparation& preparation, const StepSizes& sizes)
      : values_dtype(sizes.dtype), value_columns(sizes.hidden) {
    if (!preparation.quant) return;
    const QuantizedShape shape = quantized_shape(*preparation.quant, 1, sizes.hidden);
    values_dtype = shape.values_dtype;
    value_columns = shape.values[1];
    scales_dtype = shape.scales_dtype;
    if (preparation.quant->group.rows == 1) scale_columns = shape.scales[1];
    if (scale_of_each_rank(preparation)) scale_columns = 1;
  }
};

/// `values`: of undefined ones nobody needs more than shape and dtype.
RowTensors tensors_of_rows(const RankRules& rules, const RowForm& form, std::int64_t rows,
                           std::int64_t ids, bool values, core::WorkspaceCutter& cutter) {
  const auto take = [&](DType dtype, std::int64_t columns) {
    return cutter.take(dtype, {rows, columns}, rules.device);
  };
  RowTensors result;
  if (values) result.values = take(form.values_dtype, form.value_columns);
  if (form.scale_columns > 0) result.scales = take(form.scales_dtype, form.scale_columns);
  if (rules.hooks) result.numbers = take(DType::kI32, 1);
  if (rules.num_logits > 0) {
    result.logits = take(DType::kF32, rules.num_logits);
    return result;
  }
  result.ids = take(DType::kI32, ids);
  result.weights = take(DType::kF32, ids);
  return result;
}

PreparedRows prepared_rows(core::WorkspaceCutter& cutter, const StepSizes& sizes, Device device) {
  ProblemSize problem;
  problem.num_tokens = sizes.num_tokens;
  problem.hidden = sizes.hidden;
  problem.dtype = sizes.dtype;
  return {cutter, problem, sizes.sent, device, sizes.way == RowWay::kPeerMemory};
}

/// Of this rank's experts, where all ranks have so many slots: twice as many as routing at random
/// gives. Few rows take little memory, and chance has more effect on them; on a GPU the host would
/// wait for their number.
std::int64_t room_for_rows(const RankRules& rules, std::int64_t slots, std::int64_t topk) {
  const std::int64_t few = rules.device.is_cpu() ? 1024 : 32768;
  const auto likely = std::llround(static_cast<double>(slots) * rules.local_share);
  return std::max({std::int64_t{2 * likely}, few, topk});
}

}  // namespace

std::int64_t expected_local_slots(std::int64_t rows, std::int64_t topk, double share) {
  const auto slots = static_cast<double>(topk);
  const double reached = 1 - std::pow(1 - share, slots);  // of all tokens
  return reached > 0 ? std::llround(static_cast<double>(rows) * slots * share / reached) : 0;
}

Message message(int peer, const TensorView& rows, std::int64_t begin, std::int64_t count) {
  const TensorView part = rows.slice(0, begin, begin + count);
  return {peer, part.data(), static_cast<std::size_t>(part.nbytes())};
}

StepSizes::StepSizes(const RankRules& rules, const ProblemSize& caller, const Preparation& read)
    : num_tokens(caller.num_tokens),
      max_tokens(std::max(caller.max_tokens, caller.num_tokens)),
      topk(caller.topk),
      hidden(caller.hidden),
      dtype(caller.dtype),
      way(rules.way_of(max_tokens)),
      sent(rules.sent_as(read, max_tokens)),
      read(read),
      fixed(caller.fixed_sizes),
      // With fixed sizes as many rows travel as there can be, so nothing is gained by packing them.
      // Through peer memory all ranks get the ids of all rows, and fetch those that they want.
      to_all(rules.allgather || (fixed && way == RowWay::kDeviceMessages) ||
             way == RowWay::kPeerMemory),
      capacity(rules.size * max_tokens),
      converts(sent.quant != read.quant && !(sent.quant && read.takes_quantized && !rules.hooks)),
      // Messages to all send this rank's rows from where they are received.
      by_address(read.by_address && !rules.hooks && !converts &&
                 (way == RowWay::kInPlace || (way == RowWay::kHostMessages && !to_all))),
      beside(way == RowWay::kPeerMemory && read.from_sources && !converts &&
             (sent.quant || !rules.activations) && rules.beside_from > 0 &&
             max_tokens >= rules.beside_from),
      to_targets(way == RowWay::kPeerMemory && read.to_targets) {
  if (rules.receive_capacity > 0 && !fixed) capacity = std::min(capacity, rules.receive_capacity);
  // A rank's own rows lie there too, even where it has no experts.
  if (to_all) capacity = std::max(capacity, max_tokens);
  const std::int64_t slots = rules.size * max_tokens * topk;
  const bool all = fixed || rules.one_pass || rules.receive_capacity > 0;
  max_rows = all ? 0 : room_for_rows(rules, slots, topk);
  if (max_rows >= capacity * topk) max_rows = 0;
}

RankStep::RankStep(const RankRules& rules, const StepSizes& sizes, void* memory,
                   std::int64_t packed)
    : rules_(rules),
      sizes_(sizes),
      memory_(memory),
      cutter_(memory),
      own_(prepared_rows(cutter_, sizes, rules.device)) {
  const RowForm travelling(sizes.sent, sizes), reading(sizes.read, sizes);
  const std::int64_t topk = sizes.topk, ranks = rules.size, tokens = sizes.num_tokens;
  const bool host = rules.device.is_cpu(), per_slot = rules.per_slot();
  for (Counts* counts : {&send_counts_, &recv_counts_, &slots_in_, &slots_out_}) {
    counts->resize(static_cast<std::size_t>(ranks));
  }
  origins_.resize(static_cast<std::size_t>(rules.num_all));
  const auto take_rows = [&](const RowForm& form, std::int64_t rows, std::int64_t ids,
                             bool values) {
    return tensors_of_rows(rules, form, rows, ids, values, cutter_);
  };
  if (scale_of_each_rank(sizes.sent)) row_scales_ = take(DType::kF32, {tokens, 1});
  physical_ids_ = take(DType::kI32, {tokens, topk});
  send_rows_ = take(DType::kI32, {tokens, ranks});
  own_rows_ = take(DType::kI32, {tokens, 1});
  if (host || !sizes.to_all) send_tokens_ = take(DType::kI32, {ranks, sizes.max_tokens});
  slot_counts_ = take(DType::kI32, {ranks});
  if (rules.shared) {
    output_ = take(rules.combine_dtype, {sizes.capacity * (per_slot ? topk : 1), sizes.hidden});
  }
  // Rows that others have in shared memory stay there, and those that experts bring from where they
  // lie do not come here: values then give only shape and dtype.
  const bool values_stay = (rules.shared && sizes.by_address) || sizes.beside;
  all_rows_ = take_rows(travelling, sizes.capacity + packed, topk, !values_stay);
  received_ = all_rows_.slice(0, sizes.capacity);
  if (values_stay && memory) {
    received_.values = TensorView(memory, travelling.values_dtype,
                                  {sizes.capacity, travelling.value_columns}, rules.device);
  }
  if (sizes.converts) {
    read_values_ = take(reading.values_dtype, {sizes.capacity, reading.value_columns});
    if (sizes.read.quant) {
      const QuantizedShape shape = quantized_shape(*sizes.read.quant, sizes.capacity, sizes.hidden);
      read_scales_ = take(shape.scales_dtype, shape.scales);
    }
  }
  received_at_ = sizes.by_address ? take_addresses(sizes.capacity) : nullptr;
  if (rules.num_logits > 0) {
    routed_ = {take(DType::kI32, {sizes.capacity, topk}),
               take(DType::kF32, {sizes.capacity, topk})};
  }
  expert_rows_at_ = nullptr;
  if (per_slot) {
    slot_rows_ = take(DType::kI32, {sizes.capacity, topk});
    const RowForm& form = sizes.converts ? reading : travelling;
    expert_rows_ = take_rows(form, sizes.capacity * topk, 1, !sizes.by_address);
    if (sizes.by_address) expert_rows_at_ = take_addresses(sizes.capacity * topk);
    returned_slots_ = take(DType::kI32, {tokens, topk});
  }
  row_addresses_ = host ? take_addresses(tokens * (per_slot ? topk : ranks)) : nullptr;
  if (!rules.sums.needed()) return;
  partial_ = take(rules.combine_dtype, {tokens, sizes.hidden});
  sums_.emplace(cutter_, rules.sums, tokens, sizes.hidden, rules.combine_dtype, rules.device);
}

const std::byte** RankStep::take_addresses(std::int64_t rows) {
  return static_cast<const std::byte**>(
      cutter_.take(static_cast<std::size_t>(rows) * sizeof(std::byte*)));
}

const core::Backend& RankStep::backend() const {
  return backend_of(rules_.device);
}

void RankStep::start_prepare(ForwardArgs& args) {
  name_ = {rules_.group->next_step(), rules_.layer, is_capturing(args.stream), rules_.moves};
  rules_.num_logits > 0 ? route_own(args) : find_destinations(args);
  ForwardArgs own = args;  // the caller's views stay until finish_prepare
  own_.run(own);
  send(own_rows(own), args);
  args.hidden_scales = own.hidden_scales;
}

core::TokenDestinations RankStep::destinations_of(const TensorView& topk_ids) const {
  core::TokenDestinations destinations;
  destinations.topk_ids = topk_ids;
  destinations.replica_offsets = rules_.replica_offsets;
  destinations.replicas = rules_.replicas;
  destinations.physical_ranks = rules_.physical_ranks;
  destinations.nearest_rank = rules_.nearest_rank;
  return destinations;
}

void RankStep::find_destinations(const ForwardArgs& args) const {
  if (!finds_destinations()) return;
  core::TokenDestinations destinations = destinations_of(args.topk_ids);
  destinations.row_stride = sizes_.max_tokens;
  destinations.physical_ids = physical_ids_;
  if (send_tokens_) {
    destinations.send_rows = send_rows_;
    destinations.send_counts = counted_;
    destinations.send_tokens = send_tokens_;
  }
  backend().find_destinations(destinations, args.stream);
}

/// The caller's results, and the load, are of this rank's tokens alone. The experts route those of
/// all ranks.
void RankStep::route_own(ForwardArgs& args) const {
  backend().route(*args.router, args.router_logits, args.score_correction_bias,
                  {args.topk_ids, args.topk_weights}, args.expert_load, args.stream);
  args.expert_load = {};
}

/// Values, scales, ids and weights of this rank's tokens, one of each in every row.
RowTensors RankStep::own_rows(const ForwardArgs& own) const {
  RowTensors tokens;
  tokens.values = own.hidden_states;
  tokens.ids = finds_destinations() ? physical_ids_ : own.topk_ids;
  tokens.weights = own.topk_weights;
  if (rules_.hooks) tokens.numbers = own_rows_;
  if (rules_.num_logits > 0) tokens.logits = own.router_logits;
  if (received_.scales) tokens.scales = own.hidden_scales;
  if (rules_.hooks || row_scales_) backend().number_parts(own_rows_, 0, own.stream);
  if (row_scales_) {
    const TensorView every_row = own_rows_.reshape({1, sizes_.num_tokens});
    backend().copy_to_slots(every_row, own.hidden_scales, row_scales_, own.stream);
    tokens.scales = row_scales_;
  }
  return tokens;
}

void RankStep::put_in_send_order(const RowTensors& from, const RowTensors& to,
                                 const TensorView& tokens, const TensorView& counts,
                                 std::span<const core::RowPacking::Part> parts,
                                 Stream stream) const {
  std::vector<core::RowPacking::Tensor> tensors;
  to.each(from, [&](const TensorView& target, const TensorView& source) {
    tensors.push_back({source, target});
  });
  backend().pack_rows({tensors, to.ids, tokens, counts, parts}, stream);
}

/// This rank's own rows, put among those received at once. A rank without experts keeps them there,
/// too, if all ranks get the same.
RankStep::Parts RankStep::own_part() const {
  const int rank = rules_.rank;
  const std::int64_t rows = sizes_.to_all ? rows_for_all() : send_counts_[rank];
  return {{rank, 0, rows, recv_begin(rank)}};
}

void RankStep::finish_prepare(ForwardArgs& args) {
  receive(args.stream);
  const auto arrived = [&](const TensorView& all) { return all.slice(0, 0, rows_); };
  args.hidden_states = arrived(received_.values);
  args.row_addresses = received_at_;
  args.row_sources = row_sources();
  args.row_targets = row_targets();
  args.output_memory = output_.data();
  if (rules_.hooks) tell_origins(args, arrived(received_.numbers), recv_counts_);
  if (received_.scales) args.hidden_scales = arrived(received_.scales);
  if (sizes_.converts) convert(args);
  if (rules_.num_logits > 0) {
    args.router_logits = arrived(received_.logits);
    args.topk_ids = arrived(routed_.topk_ids);
    args.topk_weights = arrived(routed_.topk_weights);
  } else {
    args.topk_ids = arrived(received_.ids);
    args.topk_weights = arrived(received_.weights);
  }
  args.expert_map = rules_.expert_map;
  // Gathered rows choose among all experts: their share of local ones is for the experts to know.
  if (!sizes_.to_all) {
    args.expected_rows = expected_local_slots(rows_, sizes_.topk, rules_.local_share);
  }
  if (rules_.per_slot()) expand_slots(args);
  args.max_rows = sizes_.max_rows;
  if (sizes_.max_rows > 0 && local_slots(args) > sizes_.max_rows) {
    args.rows_at_once = sizes_.max_rows / args.topk_ids.size(1);
  }
}

/// Rows as they have travelled become rows as the experts read them: quantized, or no longer so.
void RankStep::convert(ForwardArgs& args) const {
  const TensorView values = read_values_.slice(0, 0, rows_);
  const std::optional<QuantKey>& read = args.preparation.quant;
  TensorView scales;
  if (read) {
    scales = read->group.rows == 1 ? read_scales_.slice(0, 0, rows_) : read_scales_;
    backend().quantize(args.hidden_states, *read, args.preparation.scale, values, scales,
                       args.stream);
  } else {
    backend().dequantize(args.hidden_states, args.hidden_scales, *rules_.activations, values,
                         args.stream);
  }
  args.hidden_states = values;
  args.hidden_scales = scales;
}

void RankStep::expand_slots(ForwardArgs& args) {
  core::SlotExpansion expansion;
  expansion.ids = args.topk_ids;
  expansion.expert_map = args.expert_map;
  expansion.slot_rows = slot_rows_.slice(0, 0, rows_);
  expansion.row_ids = expert_rows_.ids;
  expansion.row_weights = expert_rows_.weights;
  expansion.counts = slot_counts_;
  backend().expand_slots(expansion, recv_counts_, slots_in_, args.stream);
  const std::int64_t rows = std::accumulate(slots_in_.begin(), slots_in_.end(), std::int64_t{0});
  const auto expand = [&](TensorView& view, const TensorView& expanded) {
    backend().copy_to_slots(expansion.slot_rows, view, expanded, args.stream);
    view = expanded.slice(0, 0, rows);
  };
  if (expert_rows_at_) {
    locate_slots(args, rows);
  } else {
    expand(args.hidden_states, expert_rows_.values);
  }
  if (expert_rows_.scales) expand(args.hidden_scales, expert_rows_.scales);
  if (rules_.hooks) {
    TensorView numbers = args.origins.numbers;
    expand(numbers, expert_rows_.numbers);
    tell_origins(args, numbers, slots_in_);
  }
  args.expected_rows = rows;
  args.topk_ids = expansion.row_ids.slice(0, 0, rows);
  args.topk_weights = expansion.row_weights.slice(0, 0, rows);
}

/// Where the rows of slots lie, if experts read them by address. The hidden states are then no more
/// than a shape.
void RankStep::locate_slots(ForwardArgs& args, std::int64_t rows) const {
  const auto* slot_rows = slot_rows_.as<const std::int32_t>();
  for (std::int64_t slot = 0; slot < rows_ * sizes_.topk; ++slot) {
    if (slot_rows[slot] < 0) continue;
    expert_rows_at_[slot_rows[slot]] = received_at_[slot / sizes_.topk];
  }
  args.row_addresses = expert_rows_at_;
  args.hidden_states = TensorView(args.hidden_states.data(), args.hidden_states.dtype(),
                                  {rows, args.hidden_states.size(1)});
}

/// `counts`: of each rank of the group. Its ranks are in ascending order, as the rows are.
void RankStep::tell_origins(ForwardArgs& args, const TensorView& numbers, const Counts& counts) {
  for (int r = 0; r < rules_.size; ++r) origins_[rules_.members[r]] = counts[r];
  args.origins = {numbers, origins_};
}

/// How the rows of a token are added.
core::ReduceArgs RankStep::reduce_args(const ForwardArgs& args) const {
  core::ReduceArgs reduce;
  reduce.output = sums_ ? partial_ : args.output;
  reduce.fused_output = args.fused_output;
  reduce.topk_weights = args.topk_weights;
  reduce.router_weight_on_input =
      !rules_.per_slot() || args.preparation.apply_router_weight_on_input;
  reduce.accumulate = args.accumulate && !sums_;
  reduce.stream = args.stream;
  return reduce;
}

void RankStep::finish_finalize(const ForwardArgs& args) {
  sum(args);
  if (!sums_) return;
  rules_.sums.run(partial_, args.output, args.accumulate, *sums_, args.stream, what("sum"));
}

}  // namespace fusedmoe::layer
