#include "layer/peer_rows.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/ceil_div.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "layer/backend.h"

namespace fusedmoe::layer {
namespace {

constexpr std::int64_t kAlignment = 256;

std::int64_t take(std::int64_t& next, std::int64_t bytes) {
  const std::int64_t begin = core::round_up(next, kAlignment);
  next = begin + bytes;
  return begin;
}

/// Places what ranks publish. `row_bytes`: of each tensor that travels. Returns where it ends.
std::int64_t place_published(PeerStep& step, std::int64_t num_ranks,
                             std::span<const std::int64_t> row_bytes) {
  auto next = static_cast<std::int64_t>(PeerMemory::head_bytes());
  const std::int64_t slots = num_ranks * step.most_tokens * step.topk;
  step.ids = take(next, slots * std::int64_t{sizeof(std::int32_t)});
  step.weights = take(next, slots * std::int64_t{sizeof(float)});
  for (std::size_t t = 0; t < row_bytes.size(); ++t) {
    step.rows[t] = take(next, step.most_tokens * row_bytes[t]);
  }
  return next;
}

/// Places what is added, so that it ends where the arena does. Returns its bytes.
std::int64_t place_results(PeerStep& step, std::int64_t arena_bytes, std::int64_t result_bytes) {
  std::int64_t bytes = 0;
  const std::int64_t results = take(bytes, result_bytes);
  const std::int64_t own_ids =
      take(bytes, step.most_tokens * step.topk * std::int64_t{sizeof(std::int32_t)});
  bytes = core::round_up(bytes, kAlignment);
  const std::int64_t begin = arena_bytes / kAlignment * kAlignment - bytes;
  step.results = begin + results;
  step.own_ids = begin + own_ids;
  return bytes;
}

/// Rows that are left for a rank's tokens.
std::int64_t num_results(std::int64_t num_ranks, const PeerStep& step, bool per_slot) {
  return step.most_tokens * (per_slot ? step.topk : num_ranks);
}

std::int64_t row_bytes(const TensorView& rows) {
  return bytes(rows.dtype(), rows.size(1));
}

/// Values, and scales where rows have some.
std::vector<TensorView> travelling(const RowTensors& rows) {
  std::vector<TensorView> result{rows.values};
  if (rows.scales) result.push_back(rows.scales);
  return result;
}

}  // namespace

PeerRows::PeerRows(const RankRules& rules, const StepSizes& sizes, void* memory)
    : RankStep(rules, sizes, memory, 0) {
  if (!memory) return;
  const std::int64_t ranks = rules.size, most = sizes.max_tokens, topk = sizes.topk;
  step_.layer = rules.layer;
  step_.placement = rules.version.as<const std::uint32_t>();
  step_.most_tokens = most;
  step_.topk = topk;
  std::vector<std::int64_t> travel;
  for (const TensorView& each : travelling(received_)) {
    travel.push_back(row_bytes(each));
    step_.row_bytes += travel.back();
  }
  place_published(step_, ranks, travel);
  const std::int64_t result_bytes = fusedmoe::bytes(rules.combine_dtype, sizes.hidden);
  place_results(step_, static_cast<std::int64_t>(peers().bytes()),
                num_results(ranks, step_, rules.per_slot()) * result_bytes);
  targets_ = peers().targets(step_, result_bytes, rules.per_slot());
  std::byte* const arena = peers().own();
  own_.place(arena + step_.rows[0], arena + step_.rows[1]);
  received_.ids = TensorView(arena + step_.ids, DType::kI32, {ranks * most, topk}, rules.device);
  received_.weights =
      TensorView(arena + step_.weights, DType::kF32, {ranks * most, topk}, rules.device);
  if (sizes.beside) sources_ = peers().sources(step_, travel);
}

PeerBytes PeerRows::arena_bytes(const MoeConfig& config, const RankOptions& ranks, int num_ranks) {
  const bool per_slot = config.combine == CombineMode::kPerSlot;
  const DType combine = per_slot ? DType::kF32 : ranks.combine_dtype.value_or(config.dtype);
  std::array<std::int64_t, PeerStep::kMostTensors> travel{
      fusedmoe::bytes(config.dtype, config.hidden), 0};
  if (const std::optional<QuantKey>& key = config.scheme.activations) {
    const QuantizedShape row = quantized_shape(*key, 1, config.hidden);
    travel[1] =
        std::max(fusedmoe::bytes(row.scales_dtype, row.scales[1]), std::int64_t{sizeof(float)});
  }
  PeerStep step;
  step.most_tokens = ranks.max_tokens_per_rank;
  step.topk = config.topk;
  PeerBytes bytes;
  bytes.published = static_cast<std::size_t>(place_published(step, num_ranks, travel));
  const std::int64_t results =
      num_results(num_ranks, step, per_slot) * fusedmoe::bytes(combine, config.hidden);
  // The end of an arena need not be aligned.
  bytes.results = static_cast<std::size_t>(place_results(step, 0, results) + kAlignment);
  return bytes;
}

/// All ranks fetch what they need, so nobody must know how many rows come.
void PeerRows::send(const RowTensors& own, const ForwardArgs& args) {
  if (peers().has_ended()) rules_.group->check();
  set_fixed_counts();
  check_received();
  const std::vector<TensorView> tensors = travelling(own);
  const core::ReplicaTable replicas(destinations_of(own.ids));
  peers().publish(step_, {tensors, own.ids, own.weights, replicas}, args.stream);
}

void PeerRows::receive(Stream stream) {
  std::vector<TensorView> tensors;
  if (!sizes_.beside) tensors = travelling(received_);
  PulledRows rows{tensors, rules_.expert_map, rules_.num_local_experts, {}, {}};
  rows.counts_slots = sizes_.max_rows > 0;
  if (rules_.per_slot()) {
    rows.slot_rows = slot_rows_;
    rows.ones = expert_rows_.weights;
  }
  peers().pull(step_, rows, stream);
}

/// The row of a slot has the slot's number. Nobody reads those of other ranks' experts.
void PeerRows::expand_slots(ForwardArgs& args) {
  const std::int64_t slots = rows_ * sizes_.topk;
  const auto of_slots = [&](const TensorView& all) {
    return TensorView(const_cast<void*>(all.data()), all.dtype(), {slots, 1}, rules_.device);
  };
  const auto expand = [&](TensorView& view, const TensorView& expanded) {
    backend().copy_to_slots(slot_rows_.slice(0, 0, rows_), view, expanded, args.stream);
    view = expanded.slice(0, 0, slots);
  };
  expand(args.hidden_states, expert_rows_.values);
  if (expert_rows_.scales) expand(args.hidden_scales, expert_rows_.scales);
  args.topk_ids = of_slots(args.topk_ids);
  args.topk_weights = of_slots(expert_rows_.weights);
}

void PeerRows::give_back(const ForwardArgs& args) {
  if (!row_targets()) {
    const std::int64_t rows = args.fused_output.size(0);
    const TensorView ids(const_cast<void*>(received_.ids.data()), DType::kI32,
                         {rows, rules_.per_slot() ? 1 : sizes_.topk}, rules_.device);
    peers().leave({args.fused_output, ids, rules_.expert_map, rules_.num_local_experts}, targets_,
                  args.stream);
  }
  if (!args.undivided) peers().tell_results(step_, args.stream);
}

void PeerRows::sum(const ForwardArgs& args) {
  const core::ReduceArgs reduce = reduce_args(args);
  PeerSum sum;
  sum.output = reduce.output;
  sum.accumulate = reduce.accumulate;
  sum.results = rules_.combine_dtype;
  sum.physical_ranks = rules_.physical_ranks;
  sum.per_slot = rules_.per_slot();
  if (!reduce.router_weight_on_input) sum.weights = args.topk_weights;
  peers().sum(step_, sum, args.stream);
}

/// The experts may take several passes, so the host must know how many rows they get. It waits.
std::int64_t PeerRows::local_slots(const ForwardArgs& args) const {
  const std::optional<std::int64_t> count = peers().local_slots(args.stream);
  if (!count) rules_.group->check();
  return count.value_or(0);
}

}  // namespace fusedmoe::layer
