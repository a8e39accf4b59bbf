#include "bench/rank_row.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "bench/bench_problem.h"
#include "bench/rank_link.h"
#include "bench/rank_report.h"
#include "bench/rank_setup.h"
#include "bench/rank_timer.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "layer/prepared_rows.h"
#include "ranks.h"
#include "support.h"
#include "testing/cases.h"

namespace fusedmoe::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// One rank's part of one row.
class RankBench {
 public:
  RankBench(const RankBenchOptions& options, std::shared_ptr<Communicator> communicator,
            const RankExperts& experts, const RankSubject& subject, std::int64_t num_tokens);
  RankRow run();

 private:
  void make_buffers();
  void count_rows(const TensorView& topk_ids);
  void dispatch();
  void run_experts();
  void run_experts_alone();
  void combine();
  RankPhases row_phases();
  void time_rows(RankRow& row);
  void time_bare(RankRow& row);
  void time_steps(RankRow& row);
  std::vector<Message> messages(bool incoming, std::int64_t row_bytes);
  static void copy_bytes(const Tensor& from, const std::vector<Message>& messages);
  std::optional<float> static_scale() const {
    const std::optional<QuantKey>& key = config_.scheme.activations;
    return key && !key->dynamic ? experts_.weights->info().a1_scale : std::nullopt;
  }
  /// Else the ranks have the same tokens, and combine adds their sums.
  bool travels() const { return config_.parallel.needs_dispatch(); }
  int group() const { return communicator_->rank() / config_.parallel.group_size(); }
  std::vector<Message> sum_messages(bool incoming);
  /// Behind a dispatch: without dispatch_dtype rows travel as the experts get them.
  DType sent_dtype() const { return config_.dispatch_dtype.value_or(inner_.hidden_states.dtype()); }
  std::int64_t sent_row_bytes() const {
    return layer::sent_row_bytes(config_, sent_dtype() != config_.dtype);
  }
  std::int64_t returned_row_bytes() const { return bytes(config_.dtype, config_.hidden); }
  bool per_slot() const { return config_.combine == CombineMode::kPerSlot; }
  std::vector<std::int64_t> of_others(const std::vector<std::int64_t>& mine) const;
  /// What is timed alone are the data plane's collectives. Beside all2all it is messages, also
  /// where that uses an all-gather.
  bool gathers() const {
    return uses_graphs() && transport_.name() == "allgather_reducescatter" &&
           static_cast<int>(ranks_of_rows(config_.parallel, transport_).size()) ==
               communicator_->size();
  }
  bool by_peer_memory() const {
    const std::string travel = prepare_finalize_->rows_travel();
    return travel.starts_with("peer memory") && !travel.starts_with("peer memory up to");
  }
  /// Then there is nothing that rows could come beside, and nobody else sends them back.
  Preparation without_experts() const {
    Preparation preparation = args_.preparation;
    preparation.from_sources = preparation.to_targets = false;
    return preparation;
  }
  bool uses_graphs() const { return fixed_sizes_ && communicator_->backend() == "nccl"; }

  std::shared_ptr<Communicator> communicator_;
  const RankExperts& experts_;
  const PrepareFinalizeDescriptor& transport_;
  const bool fixed_sizes_, rows_only_, bare_too_;
  const std::int64_t num_tokens_;
  Device device_;
  OwnedStream stream_;
  RankTimer timer_;
  MoeConfig config_;
  std::shared_ptr<const PrepareAndFinalize> prepare_finalize_;
  ForwardArgs args_, inner_;  // of the caller, and of the experts
  Tensor hidden_states_, ids_, factors_, expert_map_, output_, workspace_, rows_, scratch_, bare_;
  Tensor arrived_;                             // all rows of the experts in one place
  std::vector<std::int64_t> sent_, received_;  // rows, for each rank
  std::vector<std::int64_t> returned_slots_;   // per slot: rows that go back to each rank
  std::vector<double> experts_us_;             // of each call on the CPU
};

RankBench::RankBench(const RankBenchOptions& options, std::shared_ptr<Communicator> communicator,
                     const RankExperts& experts, const RankSubject& subject,
                     std::int64_t num_tokens)
    : communicator_(std::move(communicator)),
      experts_(experts),
      transport_(*subject.transport),
      fixed_sizes_(subject.fixed_sizes),
      rows_only_(subject.rows_only),
      bare_too_(subject.bare),
      num_tokens_(num_tokens),
      device_(communicator_->device()),
      stream_(device_),
      timer_(*communicator_, stream_, {options.min_samples, options.max_seconds, uses_graphs()}),
      config_(rank_config(options, communicator_->rank(), device_)) {
  config_.combine = subject.combine;
  prepare_finalize_ = transport_.create(config_, context_of(subject, communicator_, num_tokens));

  testing::Case spec;
  spec.num_tokens = num_tokens;
  spec.num_experts = config_.num_experts;
  spec.topk = config_.topk;
  spec.hidden = spec.intermediate = 16;
  spec.seed = static_cast<std::uint64_t>(group());  // whose ranks have the same tokens
  const testing::Problem problem = testing::make_problem(spec);
  ids_ = to_device(problem.topk_ids, device_);
  factors_ = to_device(problem.topk_weights, device_);
  make_buffers();
  count_rows(problem.topk_ids);
}

void RankBench::make_buffers() {
  const auto filled = [&](const Shape& shape, DType dtype) {
    Tensor tensor = Tensor::empty(shape, dtype, device_);
    // What nobody has written is one page of zeros, which is always in the cache.
    fill_bytes(tensor, 0x3c, stream_);
    return tensor;
  };
  const auto block = [&](std::size_t bytes) {
    return filled({static_cast<std::int64_t>(bytes)}, DType::kU8);
  };
  hidden_states_ = filled({num_tokens_, config_.hidden}, config_.dtype);
  output_ = filled({num_tokens_, config_.hidden}, config_.dtype);
  args_.weights = experts_.weights.get();
  args_.hidden_states = hidden_states_;
  args_.output = output_;
  args_.topk_ids = ids_;
  args_.topk_weights = factors_;
  args_.max_tokens = num_tokens_;
  args_.fixed_sizes = fixed_sizes_;
  args_.undivided = true;
  args_.num_experts = config_.num_experts;
  if (!travels() && config_.has_expert_map) {  // else the transport has one
    const auto placement = ExpertPlacement::linear(config_.num_experts, config_.parallel.ep_size);
    expert_map_ = to_device(placement.expert_map(communicator_->rank()), device_);
    args_.expert_map = expert_map_;
  }
  args_.stream = stream_;
  args_.preparation =
      make_preparation(*select(config_).experts, config_.scheme, false, static_scale());
  ProblemSize problem = ProblemSize::of(config_, num_tokens_);
  problem.max_tokens = num_tokens_;
  problem.fixed_sizes = fixed_sizes_;
  const TransportSizes sizes = prepare_finalize_->sizes(problem, args_.preparation);
  const TransportSizes rows_alone = prepare_finalize_->sizes(problem, without_experts());
  workspace_ = block(std::max(sizes.workspace_bytes, rows_alone.workspace_bytes));
  args_.prepare_workspace = workspace_.data();
  const ProblemSize& arriving = sizes.experts;
  auto bytes = static_cast<std::size_t>(arriving.num_tokens *
                                        fusedmoe::bytes(arriving.output_dtype, config_.hidden));
  if (experts_.experts) {
    const WorkspaceSizes sizes = experts_.experts->workspace_sizes(arriving);
    bytes = std::max(bytes, sizes.common_bytes());
    scratch_ = block(sizes.workspace2_bytes);
    args_.workspace2 = scratch_.data();
    if (args_.preparation.from_sources && !per_slot()) {
      arrived_ = filled({arriving.num_tokens, config_.hidden}, config_.dtype);
    }
  }
  rows_ = block(bytes);
  args_.workspace13 = rows_.data();
  bare_ = filled({2 * communicator_->size() * num_tokens_, config_.hidden}, config_.dtype);
}

/// As many rows as the step itself sends, or other ranks fetch.
void RankBench::count_rows(const TensorView& topk_ids) {
  const int size = communicator_->size();
  const bool to_all = !by_peer_memory() && (transport_.name() != "all2all" || fixed_sizes_);
  const auto placement = ExpertPlacement::linear(config_.num_experts, size);
  sent_.assign(size, 0);
  std::vector<std::int64_t> slots(size, 0);
  for (std::int64_t token = 0; token < num_tokens_; ++token) {
    std::vector<bool> goes(size, to_all);
    for (std::int64_t slot = 0; slot < config_.topk; ++slot) {
      const std::int32_t id = topk_ids.as<const std::int32_t>()[token * config_.topk + slot];
      goes[placement.rank_of()[id]] = true;
      ++slots[placement.rank_of()[id]];
    }
    for (const int r : ranks_of_rows(config_.parallel, transport_)) sent_[r] += goes[r];
  }
  received_ = of_others(sent_);
  if (per_slot()) returned_slots_ = of_others(slots);
}

/// The number that each rank has for this one.
std::vector<std::int64_t> RankBench::of_others(const std::vector<std::int64_t>& mine) const {
  std::vector<std::int64_t> result;
  for (const std::string& other :
       communicator_->gather(fmt::format("{}", fmt::join(mine, " ")), "bench")) {
    std::istringstream numbers(other);
    std::int64_t number = 0;
    for (int r = 0; r <= communicator_->rank(); ++r) numbers >> number;
    result.push_back(number);
  }
  return result;
}

/// The same rows without what surrounds them.
std::vector<Message> RankBench::messages(bool incoming, std::int64_t row_bytes) {
  std::vector<Message> result;
  auto* next = bare_.as<char>() + (incoming ? bare_.nbytes() / 2 : 0);
  const int size = communicator_->size();
  for (int r = 0; r < size; ++r) {
    const std::int64_t bytes = (incoming ? received_ : sent_)[r] * row_bytes;
    if (r != communicator_->rank()) result.push_back({r, next, static_cast<std::size_t>(bytes)});
    next += num_tokens_ * returned_row_bytes();
  }
  return result;
}

/// What a sum over ranks with the same tokens sends twice: a share of the parts to the rank that
/// adds it up, then the rank's own share of the total to all others.
std::vector<Message> RankBench::sum_messages(bool incoming) {
  const std::vector<int> ranks = ranks_of_sums(config_.parallel, transport_);
  const auto count = static_cast<std::int64_t>(ranks.size());
  const std::int64_t bytes = (num_tokens_ + count - 1) / count * returned_row_bytes();
  std::vector<Message> result;
  auto* next = bare_.as<char>() + (incoming ? bare_.nbytes() / 2 : 0);
  for (const int r : ranks) {
    if (r != communicator_->rank()) result.push_back({r, next, static_cast<std::size_t>(bytes)});
    next += bytes;
  }
  return result;
}

/// As many bytes as the messages have, each message by one call.
void RankBench::copy_bytes(const Tensor& from, const std::vector<Message>& messages) {
  for (const Message& message : messages) std::memcpy(message.data, from.data(), message.bytes);
}

void RankBench::dispatch() {
  inner_ = args_;
  prepare_finalize_->start_prepare(inner_);
  prepare_finalize_->finish_prepare(inner_);
  void* const memory = inner_.output_memory ? inner_.output_memory : inner_.workspace13;
  inner_.fused_output = TensorView(memory, per_slot() ? DType::kF32 : config_.dtype,
                                   {inner_.hidden_states.size(0), config_.hidden}, device_);
  args_.fused_output = inner_.fused_output;
  args_.step = inner_.step;
}

void RankBench::run_experts() {
  const Clock::time_point start = Clock::now();
  experts_.experts->apply(inner_);
  const std::chrono::duration<double, std::micro> time = Clock::now() - start;
  experts_us_.push_back(time.count());
}

/// As on one GPU, which has all rows in one place, and leaves what it computes there.
void RankBench::run_experts_alone() {
  ForwardArgs args = inner_;
  if (args.row_sources) {
    args.hidden_states = TensorView(arrived_.data(), args.hidden_states.dtype(),
                                    args.hidden_states.shape(), device_);
    args.row_sources = nullptr;
  }
  args.row_targets = nullptr;
  experts_.experts->apply(args);
}

void RankBench::combine() {
  prepare_finalize_->start_finalize(args_);
  prepare_finalize_->finish_finalize(args_);
}

/// Dispatch and combine, which follow each other. In graphs each is replayed many times before the
/// next is; but ranks that fetch rows from each other's memory begin no step before all have ended
/// the last, so there the two are one phase.
RankPhases RankBench::row_phases() {
  const bool apart = !uses_graphs() || !by_peer_memory() || !travels();
  if (apart) return {[&] { dispatch(); }, [&] { combine(); }};
  return {[&] {
    dispatch();
    combine();
  }};
}

/// Dispatch and combine; on the CPU copies in turns with them, so that caches hold as little of
/// what is copied.
void RankBench::time_rows(RankRow& row) {
  const Preparation preparation = args_.preparation;
  args_.preparation = without_experts();
  dispatch();
  combine();
  row.sent_dtype = name(sent_dtype());
  RankPhases phases = row_phases();
  const std::vector<Message> sent = messages(false, sent_row_bytes());
  // Back goes what came, and then both messages of the sum.
  std::vector<Message> returned = messages(true, returned_row_bytes());
  const std::vector<Message> summed = sum_messages(false);
  for (int i = 0; i < 2; ++i) returned.insert(returned.end(), summed.begin(), summed.end());
  if (device_.is_cpu()) {
    phases.emplace_back([&] { copy_bytes(hidden_states_, sent); });
    phases.emplace_back([&] { copy_bytes(rows_, returned); });
  }
  const auto bytes_of = [](const std::vector<Message>& messages) {
    double bytes = 0;
    for (const Message& message : messages) bytes += static_cast<double>(message.bytes);
    return bytes;
  };
  std::vector<double> mine = timer_.medians_us(phases);
  if (phases.size() == 1) mine.push_back(0);
  mine.resize(4);
  if (!travels()) mine[0] = 0;  // what the experts read was made here
  double returned_bytes = bytes_of(returned);
  if (per_slot()) {
    returned_slots_[communicator_->rank()] = 0;
    returned_bytes = static_cast<double>(
        bytes(DType::kF32, config_.hidden) *
        std::accumulate(returned_slots_.begin(), returned_slots_.end(), std::int64_t{0}));
  }
  mine.insert(mine.end(), {bytes_of(sent), returned_bytes});
  const ValuesByRank all = gather_values(*communicator_, mine);
  row.ranks.dispatch_us = values_of(all, 0);
  row.ranks.combine_us = values_of(all, 1);
  row.copy_us = largest_of(values_of(all, 2)) + largest_of(values_of(all, 3));
  row.ranks.sent_bytes = values_of(all, 4);
  row.ranks.returned_bytes = values_of(all, 5);
  row.dispatch_us = largest_of(row.ranks.dispatch_us);
  row.combine_us = largest_of(row.ranks.combine_us);
  row.sent_bytes = largest_of(row.ranks.sent_bytes);
  row.returned_bytes = largest_of(row.ranks.returned_bytes);
  args_.preparation = preparation;
}

/// The data plane alone for the same bytes.
void RankBench::time_bare(RankRow& row) {
  const Stream stream = stream_;
  const std::vector<Message> sum_out = sum_messages(false), sum_in = sum_messages(true);
  const auto time = [&](std::int64_t row_bytes, bool back, const std::function<void()>& gathered) {
    const std::vector<Message> out = messages(back, row_bytes), in = messages(!back, row_bytes);
    return timer_.largest(timer_
                              .medians_us({[&] {
                                if (gathers()) {
                                  gathered();
                                } else if (travels()) {
                                  communicator_->exchange(out, in, stream, "bench");
                                }
                                for (int i = 0; back && !sum_out.empty() && i < 2; ++i) {
                                  communicator_->exchange(sum_out, sum_in, stream, "bench");
                                }
                              }})
                              .front());
  };
  if (travels()) {
    row.bare_dispatch_us = time(sent_row_bytes(), false, [&] {
      const Gather all{bare_.data(), static_cast<std::size_t>(num_tokens_ * sent_row_bytes())};
      communicator_->all_gather({&all, 1}, stream, "bench");
    });
  }
  row.bare_combine_us = time(returned_row_bytes(), true, [&] {
    communicator_->reduce_scatter(bare_.data(), bare_.as<char>() + bare_.nbytes() / 2,
                                  num_tokens_ * config_.hidden, config_.dtype, stream, "bench");
  });
}

/// Times whole steps: dispatch, experts, combine. On the CPU each step also tells how long its
/// experts took. On CUDA a step only enqueues, so the experts are timed alone, in further runs.
void RankBench::time_steps(RankRow& row) {
  const auto step = [&] {
    dispatch();
    run_experts();
    combine();
  };
  if (!device_.is_cpu()) {
    RankPhases phases = row_phases();
    phases.insert(phases.end() - (phases.size() > 1 ? 1 : 0), [&] { run_experts_alone(); });
    phases.insert(phases.begin(), step);
    const ValuesByRank all = gather_values(*communicator_, timer_.medians_us(phases));
    row.step_us = largest_of(values_of(all, 0));
    row.ranks.experts_us = values_of(all, 2);
    row.experts_us = largest_of(row.ranks.experts_us);
    row.exposed_us = row.step_us - row.experts_us;
    return;
  }
  const std::vector<double> mine = timer_.samples_us({step}).front();
  const auto untimed = static_cast<std::ptrdiff_t>(experts_us_.size() - mine.size());
  experts_us_.erase(experts_us_.begin(), experts_us_.begin() + untimed);
  row.ranks.experts_us = values_of(gather_values(*communicator_, {median(experts_us_)}), 0);
  const std::vector<double> steps = timer_.largest(mine), experts = timer_.largest(experts_us_);
  std::vector<double> exposed;
  for (std::size_t i = 0; i < steps.size(); ++i) exposed.push_back(steps[i] - experts[i]);
  row.step_us = median(steps);
  row.experts_us = median(experts);
  row.exposed_us = median(exposed);
}

RankRow RankBench::run() {
  RankRow row;
  row.transport = transport_.name();
  row.fixed_sizes = fixed_sizes_;
  row.backend = by_peer_memory() ? "peer memory" : communicator_->backend();
  row.num_tokens = num_tokens_;
  row.combine = config_.combine;
  time_rows(row);
  if (bare_too_) time_bare(row);
  if (experts_.experts && !rows_only_) time_steps(row);
  return row;
}

}  // namespace

Context context_of(const RankSubject& subject, std::shared_ptr<Communicator> communicator,
                   std::int64_t max_tokens) {
  Context context;
  context.ranks.max_tokens_per_rank = max_tokens;
  context.ranks.combine = subject.combine;
  // Which only rows that are counted can keep, and which fixed sizes do not need.
  if (subject.as_messages) context.ranks.receive_capacity = communicator->size() * max_tokens;
  context.ranks.communicator = std::move(communicator);
  return context;
}

RankRow time_rank_row(const RankBenchOptions& options, std::shared_ptr<Communicator> communicator,
                      const RankExperts& experts, const RankSubject& subject,
                      std::int64_t num_tokens) {
  return RankBench(options, std::move(communicator), experts, subject, num_tokens).run();
}

}  // namespace fusedmoe::cli
