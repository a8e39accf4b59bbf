#include "layer/rank_rules.h"

#include <algorithm>
#include <numeric>

#include "core/ceil_div.h"
#include "core/device_runtime.h"
#include "core/format.h"
#include "fusedmoe/runtime.h"
#include "moe/placement.h"

namespace fusedmoe::layer {
namespace {

/// Host memory that the device copies by itself.
Tensor pinned(const Shape& shape, DType dtype, Device device) {
  const auto bytes = static_cast<std::size_t>(fusedmoe::bytes(dtype, shape.numel()));
  const std::shared_ptr<void> memory = core::runtime_of(device).allocate_pinned(bytes, device);
  return Tensor(TensorView(memory.get(), dtype, shape), memory);
}

ExpertPlacement placement_on(const ParallelConfig& parallel, const MoeConfig& config,
                             const RankOptions& options) {
  // Else every rank has a slice of all experts.
  if (parallel.ep_size == 1) return ExpertPlacement::linear(config.num_experts, 1);
  return core::placement_of(options.placement, config.num_experts, parallel.ep_size);
}

}  // namespace

std::int64_t record_bytes(int num_ranks) {
  const auto bytes =
      sizeof(StepHeader) + 2 * static_cast<std::size_t>(num_ranks) * sizeof(std::int32_t);
  return core::round_up(static_cast<std::int64_t>(bytes), alignof(StepHeader));
}

RankRules::RankRules(const MoeConfig& config, const Context& context, bool allgather)
    : device(config.device),
      allgather(allgather),
      drop_rows(context.ranks.drop_rows),
      activations(config.scheme.activations),
      quantizes_first(config.dispatch_dtype ? std::optional(*config.dispatch_dtype != config.dtype)
                                            : std::nullopt),
      combine(config.combine),
      combine_dtype(per_slot() ? DType::kF32 : context.ranks.combine_dtype.value_or(config.dtype)),
      receive_capacity(context.ranks.receive_capacity),
      max_tokens_per_rank(context.ranks.max_tokens_per_rank),
      num_local_experts(config.num_local_experts),
      local_share(static_cast<double>(num_local_experts) / static_cast<double>(config.num_experts)),
      num_logits(config.monolithic ? config.num_experts : 0),
      hooks(config.hooks),
      one_pass(hooks || config.monolithic || batch_dependent(config.scheme)),
      sums(nullptr),
      parallel(config.parallel),
      placement(placement_on(config.parallel, config, context.ranks)) {
  join(context.ranks.communicator);
  place_experts(Stream{device});
  synchronize(Stream{device});
  layer = static_cast<std::uint32_t>(group->next_layer());
  // Ranks that add their sums of the same tokens must choose the same copies.
  const bool nearest = context.ranks.replica_choice == ReplicaChoice::kNearest;
  if (nearest && !sums.needed()) nearest_rank = rank;
  if (!device.is_cpu()) {
    if (sums.needed()) sums.map_peers(config.hidden, layer, version, context.ranks.lanes);
    no_peer_memory = map_peers(config, context.ranks);
    share_gpu(*group, context.ranks.lanes, no_peer_memory);
    if (no_peer_memory.empty()) way = RowWay::kPeerMemory;
  }
  if (way == RowWay::kPeerMemory && peer_tokens == max_tokens_per_rank) return;
  if (way != RowWay::kPeerMemory) {  // else the choice has connected them
    connect_for("rows that travel", no_peer_memory, *context.ranks.communicator);
  }
  if (way == RowWay::kInPlace) return;
  records = pinned({size, record_bytes(size)}, DType::kU8, device);
}

/// The ranks that rows go to, how, and those whose sums are added to this one's.
void RankRules::join(const std::shared_ptr<Communicator>& all) {
  using Combine = ParallelConfig::Combine;
  num_all = all->size();
  members = parallel.gather_group();
  shared = device.is_cpu() && all->share_memory();
  if (allgather && static_cast<int>(members.size()) < num_all) {
    group = all->split(members.front());
  } else {
    group = all;
    members.resize(static_cast<std::size_t>(num_all));
    std::iota(members.begin(), members.end(), 0);
  }
  size = group->size();
  rank = group->rank();
  const std::vector<int> same =
      parallel.reduce_group(allgather ? Combine::kReduceScatter : Combine::kComplete);
  if (same.size() > 1) sums = RankSums(all->shared_part(same.front()));
  if (!device.is_cpu()) return;
  way = shared || group->can_lend() ? RowWay::kInPlace : RowWay::kHostMessages;
}

void RankRules::move_experts(const ExpertPlacement& moved, Stream stream) {
  core::check_same_counts(placement, moved);
  placement = moved;
  ++moves;
  place_experts(stream);
}

void RankRules::place_experts(Stream stream) {
  const bool divided = parallel.ep_size > 1;
  // Of the flat ranks, as numbers of the group; -1: a rank outside, whose experts are not reached.
  std::vector<std::int32_t> in_group(static_cast<std::size_t>(parallel.num_ranks()), -1);
  for (std::size_t i = 0; i < members.size(); ++i) {
    in_group[static_cast<std::size_t>(members[i])] = static_cast<std::int32_t>(i);
  }
  const ExpertPlacement::Table table = placement.table();
  ids_stay = true;
  for (std::size_t p = 0; p < table.physical.size(); ++p) {
    ids_stay &= placement.physical_to_logical()[p] == static_cast<std::int32_t>(p);
  }
  std::vector<std::int32_t> ranks = placement.rank_of(), map = table.local;
  std::vector<bool> owns(static_cast<std::size_t>(size), !divided);
  for (std::size_t p = 0; divided && p < map.size(); ++p) {
    if (ranks[p] != parallel.rank()) map[p] = -1;
    ranks[p] = in_group[ranks[p]];
    if (ranks[p] >= 0) owns[ranks[p]] = true;
  }
  owners.clear();
  for (int r = 0; r < size; ++r) {
    if (owns[r]) owners.push_back(r);
  }
  if (!divided) map.clear();
  if (divided && num_logits > 0) {  // experts that route by themselves know nothing of copies
    const Tensor of_logical = placement.expert_map(parallel.ep_rank);
    const auto* locals = of_logical.as<const std::int32_t>();
    map.assign(locals, locals + of_logical.numel());
  }
  const std::int32_t number = static_cast<std::int32_t>(moves);
  write({{version, {&number, 1}},
         {replica_offsets, table.offsets},
         {replicas, table.physical},
         {physical_ranks, ranks},
         {expert_map, map}},
        stream);
}

/// Writes all maps by one copy. Later calls bring maps of the same sizes. An empty map stays
/// undefined.
void RankRules::write(std::initializer_list<Map> maps, Stream stream) {
  constexpr std::int64_t kUnit = 64;  // 256 bytes
  if (!maps_) {
    std::int64_t total = 0;
    for (const Map& each : maps) total += core::round_up(std::ssize(each.numbers), kUnit);
    written_ = pinned({total}, DType::kI32, device);
    fill_bytes(written_, 0, {});
    maps_ = Tensor::empty({total}, DType::kI32, device);
  }
  std::int64_t next = 0;
  for (const auto& [tensor, numbers] : maps) {
    if (numbers.empty()) continue;
    std::ranges::copy(numbers, written_.as<std::int32_t>() + next);
    tensor = Tensor(maps_.slice(0, next, next + std::ssize(numbers)), maps_.owner());
    next += core::round_up(std::ssize(numbers), kUnit);
  }
  copy(written_, maps_, stream);
}

Preparation RankRules::sent_as(const Preparation& read, std::int64_t max_tokens) const {
  const bool is_faster = may_quantize(read) && max_tokens >= quantized_from &&
                         way_of(max_tokens) == RowWay::kPeerMemory;
  Preparation sent = read;
  sent.quant = quantizes_first.value_or(read.quant || is_faster) ? activations : std::nullopt;
  if (!sent.quant) sent.scale.reset();
  return sent;
}

}  // namespace fusedmoe::layer
