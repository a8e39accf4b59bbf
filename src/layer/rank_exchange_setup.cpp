// What RankExchange is made of: who its ranks are, which of them have which experts, and how large
// its buffers are.
#include <algorithm>
#include <cmath>

#include "core/device_runtime.h"
#include "fusedmoe/runtime.h"
#include "layer/rank_exchange.h"

namespace fusedmoe::layer {
namespace {

Tensor on_device(const std::vector<std::int32_t>& numbers, Device device) {
  const Tensor host =
      borrow(numbers.data(), DType::kI32, {static_cast<std::int64_t>(numbers.size())});
  const Tensor copied = Tensor::empty(host.shape(), DType::kI32);
  copy(host, copied, {});
  return to_device(copied, device);
}

}  // namespace

std::int64_t expected_local_slots(std::int64_t rows, std::int64_t topk, double share) {
  const auto slots = static_cast<double>(topk);
  const double reached = 1 - std::pow(1 - share, slots);  // of all tokens
  return reached > 0 ? std::llround(static_cast<double>(rows) * slots * share / reached) : 0;
}

RankExchange::RankExchange(const PrepareFinalizeDescriptor& descriptor, const MoeConfig& config,
                           const Context& context, bool allgather)
    : PrepareAndFinalize(descriptor),
      allgather_(allgather),
      drop_rows_(context.ranks.drop_rows),
      // With fixed sizes as many rows travel as there can be, so nothing is gained by packing them.
      to_all_(allgather || (context.ranks.fixed_sizes && !drop_rows_ && !config.device.is_cpu())),
      activations_(config.scheme.activations),
      quantizes_first_(config.dispatch_dtype ? std::optional(*config.dispatch_dtype != config.dtype)
                                             : std::nullopt),
      combine_(config.combine),
      combine_dtype_(per_slot() ? DType::kF32 : context.ranks.combine_dtype.value_or(config.dtype)),
      fixed_sizes_(context.ranks.fixed_sizes),
      receive_capacity_(context.ranks.receive_capacity),
      max_tokens_per_rank_(context.ranks.max_tokens_per_rank),
      local_share_(static_cast<double>(config.num_local_experts) /
                   static_cast<double>(config.num_experts)),
      num_logits_(config.monolithic ? config.num_experts : 0),
      host_(config.device.is_cpu()),
      hooks_(config.hooks),
      sums_(nullptr) {
  join(config.parallel, context.ranks.communicator);
  in_place_ = shared_ || (host_ && group_->can_lend());
  // With fixed sizes padding rows are sent, too. Only the packed buffer has those.
  unpacked_ = host_ && !in_place_ && !to_all_ && !fixed_sizes_ && group_->is_byte_stream();
  place_experts(config, context.ranks);
  layer_ = static_cast<std::uint32_t>(group_->next_layer());
  const Shape records{size_, ExchangeLayout::record_bytes(size_)};
  const auto memory =
      core::runtime_of(config.device)
          .allocate_pinned(static_cast<std::size_t>(records.numel()), config.device);
  records_ = Tensor(TensorView(memory.get(), DType::kU8, records), memory);
  // Ranks that add their sums of the same tokens must choose the same copies.
  const bool nearest = context.ranks.replica_choice == ReplicaChoice::kNearest;
  if (nearest && !sums_.needed()) nearest_rank_ = rank_;
  for (auto* counts : {&step_.send_counts, &step_.recv_counts, &step_.slots_in, &step_.slots_out}) {
    counts->resize(static_cast<std::size_t>(size_));
  }
}

/// The ranks that rows go to, and those whose sums are added to this one's.
void RankExchange::join(const ParallelConfig& parallel, const std::shared_ptr<Communicator>& all) {
  using Combine = ParallelConfig::Combine;
  const std::vector<int> ranks = parallel.gather_group();
  step_.origins.resize(static_cast<std::size_t>(all->size()));
  whole_ = !allgather_ || static_cast<int>(ranks.size()) == all->size();
  shared_ = host_ && all->share_memory();
  group_ = whole_ ? all : all->split(ranks.front());
  size_ = group_->size();
  rank_ = group_->rank();
  for (int r = 0; r < size_; ++r) members_.push_back(whole_ ? r : ranks[r]);
  const std::vector<int> same =
      parallel.reduce_group(allgather_ ? Combine::kReduceScatter : Combine::kComplete);
  if (same.size() > 1) sums_ = RankSums(all->split(same.front()));
}

void RankExchange::place_experts(const MoeConfig& config, const RankOptions& options) {
  const ParallelConfig& parallel = config.parallel;
  const bool shared = parallel.ep_size > 1;  // else every rank has a slice of all experts
  const auto linear = [&] {
    return ExpertPlacement::linear(config.num_experts, shared ? parallel.ep_size : 1);
  };
  const ExpertPlacement placement = shared && options.placement ? *options.placement : linear();
  // Places of the flat ranks in the group; -1: a rank outside, whose experts are not reached.
  std::vector<std::int32_t> place(static_cast<std::size_t>(parallel.num_ranks()), -1);
  const std::vector<int> members = parallel.gather_group();
  for (std::size_t i = 0; i < place.size(); ++i) {
    const auto found = std::find(members.begin(), members.end(), static_cast<int>(i));
    if (whole_) place[i] = static_cast<std::int32_t>(i);
    if (!whole_ && found != members.end()) {
      place[i] = static_cast<std::int32_t>(found - members.begin());
    }
  }
  const ExpertPlacement::Table table = placement.table();
  ids_stay_ = true;
  for (std::size_t p = 0; p < table.physical.size(); ++p) {
    ids_stay_ &= placement.physical_to_logical()[p] == static_cast<std::int32_t>(p);
  }
  std::vector<std::int32_t> ranks = placement.rank_of(), map = table.local;
  std::vector<bool> owns(static_cast<std::size_t>(size_), !shared);
  for (std::size_t p = 0; shared && p < map.size(); ++p) {
    if (ranks[p] != parallel.rank()) map[p] = -1;
    ranks[p] = place[ranks[p]];
    if (ranks[p] >= 0) owns[ranks[p]] = true;
  }
  for (int r = 0; r < size_; ++r) {
    if (owns[r]) owners_.push_back(r);
  }
  replica_offsets_ = on_device(table.offsets, config.device);
  replicas_ = on_device(table.physical, config.device);
  physical_ranks_ = on_device(ranks, config.device);
  if (!shared) return;
  // Experts that route by themselves know nothing of copies.
  expert_map_ = config.monolithic ? to_device(placement.expert_map(parallel.ep_rank), config.device)
                                  : on_device(map, config.device);
}

/// What is done to rows before they travel, where experts read them as `read` says.
Preparation RankExchange::sent_as(const Preparation& read) const {
  Preparation sent = read;
  if (quantizes_first_) {
    sent.quant = *quantizes_first_ ? activations_ : std::nullopt;
    if (!sent.quant) sent.scale.reset();
  }
  return sent;
}

ExchangeSizes RankExchange::sizes(const ProblemSize& caller, const Preparation& preparation) const {
  ExchangeSizes sizes{};
  sizes.num_tokens = caller.num_tokens;
  sizes.max_tokens = std::max(caller.max_tokens, caller.num_tokens);
  sizes.topk = caller.topk;
  sizes.hidden = caller.hidden;
  sizes.capacity = size_ * sizes.max_tokens;
  if (receive_capacity_ > 0) sizes.capacity = std::min(sizes.capacity, receive_capacity_);
  // A rank's own rows lie there too, even where it has no experts.
  if (to_all_) sizes.capacity = std::max(sizes.capacity, sizes.max_tokens);
  sizes.num_ranks = size_;
  sizes.rank = rank_;
  sizes.num_logits = num_logits_;
  sizes.numbers = hooks_;
  sizes.sum_ranks = sums_.needed() ? sums_.communicator()->size() : 1;
  sizes.to_all = to_all_;
  sizes.per_slot = per_slot();
  sizes.packs = !to_all_ && !in_place_ && !unpacked_;
  sizes.host = host_;
  sizes.in_place = in_place_;
  sizes.shared = shared_;
  sizes.converts = sent_as(preparation).quant != preparation.quant;
  // Messages to all send this rank's rows from where they are received.
  sizes.by_address =
      preparation.by_address && host_ && (in_place_ || !to_all_) && !hooks_ && !sizes.converts;
  sizes.combine_dtype = combine_dtype_;
  return sizes;
}

ProblemSize RankExchange::problem_size(const ProblemSize& caller) const {
  ProblemSize problem = caller;
  const ExchangeSizes exchange = sizes(caller, {});
  problem.num_tokens = exchange.capacity * (per_slot() ? caller.topk : 1);
  problem.max_tokens = 0;
  if (per_slot()) problem.topk = 1;
  problem.output_dtype = combine_dtype_;
  return problem;
}

/// How many rows every rank sends to every other with fixed sizes.
std::int64_t RankExchange::fixed_rows(std::int64_t max_tokens) const {
  return drop_rows_ ? std::min(max_tokens, receive_capacity_ / size_) : max_tokens;
}

std::size_t RankExchange::workspace_bytes(const ProblemSize& caller,
                                          const Preparation& preparation) const {
  return shared_ ? 0 : layout_bytes(caller, preparation);
}

std::size_t RankExchange::shared_bytes(const ProblemSize& caller,
                                       const Preparation& preparation) const {
  return shared_ ? layout_bytes(caller, preparation) : 0;
}

std::size_t RankExchange::layout_bytes(const ProblemSize& caller,
                                       const Preparation& preparation) const {
  return ExchangeLayout(nullptr, caller, sizes(caller, preparation), sent_as(preparation),
                        preparation, {})
      .cutter.used();
}

ExchangeLayout RankExchange::layout(const ForwardArgs& args) const {
  const ProblemSize problem = core::callers_problem(args);
  Preparation sent = sent_as(args.preparation);
  if (sent.quant && !sent.quant->dynamic) sent.scale = args.weights->info().a1_scale;
  return {shared_ ? step_.shared : args.prepare_workspace,
          problem,
          sizes(problem, args.preparation),
          sent,
          args.preparation,
          args.stream.device};
}

}  // namespace fusedmoe::layer
