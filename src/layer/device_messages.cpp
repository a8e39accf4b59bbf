#include "layer/device_messages.h"

#include <numeric>

#include "fusedmoe/runtime.h"

namespace fusedmoe::layer {

DeviceMessages::DeviceMessages(const RankRules& rules, const StepSizes& sizes, void* memory)
    : RankMessages(rules, sizes, memory, sizes.to_all ? 0 : (rules.size - 1) * sizes.max_tokens) {
  if (sizes.max_rows > 0 && !rules.per_slot()) {
    numbers_ = take(DType::kI32, {sizes.num_tokens, sizes.topk});
  }
}

/// Unless physical experts have the logical numbers, every row goes to every rank, and nothing is
/// counted. A graph also serves when experts have moved, and have other numbers.
bool DeviceMessages::finds_destinations() const {
  return !rules_.ids_stay || name_.recorded || !sizes_.to_all || drops() || rules_.per_slot() ||
         sizes_.max_rows > 0;
}

/// The experts may take several passes, so the host must know how many rows they get. It waits once
/// more than for the counts of rows: the record in which both travel begins on the host.
void DeviceMessages::count_slots(Stream stream) {
  backend().number_slots({physical_ids_, rules_.physical_ranks, numbers_, slot_counts_}, slots_out_,
                         stream);
}

std::int64_t DeviceMessages::local_slots(const ForwardArgs& args) const {
  return rules_.per_slot() ? args.topk_ids.size(0) : slots_here_;
}

/// Whether the data plane's own collectives serve: the same number of rows from and to every rank.
bool DeviceMessages::gathers() const {
  return sizes_.to_all && sizes_.fixed && static_cast<int>(rules_.owners.size()) == rules_.size &&
         rules_.group->has_collectives();
}

/// With fixed sizes the host must not wait, so nothing is compared before rows travel.
void DeviceMessages::send(const RowTensors& own, const ForwardArgs& args) {
  if (sizes_.max_rows > 0 && !rules_.per_slot()) count_slots(args.stream);
  sizes_.fixed ? set_fixed_counts() : exchange_counts(args.stream);
  check_received();
  settle(args);
  if (sizes_.to_all && fills_all() && own.values.contiguous()) in_place_ = own;
  if (in_place_.values && gathers()) return;
  Parts parts = own_part();
  const Parts others = parts_of_others();
  parts.insert(parts.end(), others.begin(), others.end());
  put_in_send_order(own, all_rows_, sizes_.to_all ? TensorView() : send_tokens_,
                    sizes_.to_all ? TensorView() : counted_, parts, args.stream);
}

void DeviceMessages::receive(Stream stream) {
  if (gathers()) return gather_rows(stream);
  exchange_rows(in_place_.values ? &in_place_ : nullptr, stream);
}

void DeviceMessages::gather_rows(Stream stream) const {
  std::vector<Gather> buffers;
  const bool in_place = in_place_.values.defined();
  received_.each(
      in_place ? in_place_ : received_, [&](const TensorView& rows, const TensorView& mine) {
        const auto bytes = static_cast<std::size_t>(rows.slice(0, 0, rows_for_all()).nbytes());
        buffers.push_back({rows.data(), bytes, in_place ? mine.data() : nullptr});
      });
  rules_.group->all_gather(buffers, stream, what("dispatch"));
}

void DeviceMessages::give_back(const ForwardArgs& args) {
  scattered_ = rules_.allgather && gathers();
  if (!scattered_) return RankMessages::give_back(args);
  const TensorView& sums = sums_into_output(args) ? args.output : returned_;
  rules_.group->reduce_scatter(args.fused_output.data(), sums.data(),
                               rows_for_all() * sizes_.hidden, rules_.combine_dtype, args.stream,
                               what("combine"));
}

/// Whether the data plane's sums over ranks are the output: nothing is left to be added or
/// converted.
bool DeviceMessages::sums_into_output(const ForwardArgs& args) const {
  return fills_all() && !sums_ && !args.accumulate && args.output.dtype() == rules_.combine_dtype &&
         args.output.contiguous();
}

void DeviceMessages::sum(const ForwardArgs& args) {
  if (scattered_ && sums_into_output(args)) return;
  const int rank = rules_.rank;
  core::ReduceArgs reduce = reduce_args(args);
  reduce.fused_output = returned_;
  reduce.fused_multiply_add = rules_.per_slot();
  reduce.follows_kernel = false;
  const auto stays = [&](std::int64_t begin, std::int64_t first, std::int64_t count) {
    reduce.elsewhere = args.fused_output.slice(0, first, first + count);
    reduce.elsewhere_begin = begin;
    reduce.elsewhere_end = begin + count;
  };
  TensorView numbers = send_rows_;
  if (rules_.per_slot()) {
    const auto before = [&](const Counts& slots) {
      return std::accumulate(slots.begin(), slots.begin() + rank, std::int64_t{0});
    };
    numbers = returned_slots_;
    stays(before(slots_out_), before(slots_in_), slots_in_[rank]);
  } else {
    if (sizes_.to_all) numbers = number_all(args.stream);
    if (!scattered_) stays(returned_begin(rank), recv_begin(rank), recv_counts_[rank]);
  }
  reduce.topk_ids = numbers;
  backend().reduce(reduce, numbers);
}

/// The rows of each token where all ranks got all tokens, or one row where they are added already.
TensorView DeviceMessages::number_all(Stream stream) const {
  const std::int64_t parts = scattered_ ? 1 : static_cast<std::int64_t>(rules_.owners.size());
  const TensorView numbers(send_rows_.data(), DType::kI32, {sizes_.num_tokens, parts},
                           stream.device);
  backend().number_parts(numbers, sizes_.max_tokens, stream);
  if (drops()) {
    const Counts room(static_cast<std::size_t>(parts), rows_for_all());
    backend().limit_rows({numbers, sizes_.max_tokens, room, {}, {}, {}}, stream);
  }
  return numbers;
}

}  // namespace fusedmoe::layer
