#include "rank_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/runtime.h"
#include "ranks.h"
#include "testing/cases.h"

namespace fusedmoe::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// Names sizes; the experts do not run here.
class NoWeights final : public PackedWeights {
 public:
  using PackedWeights::PackedWeights;
  std::int64_t nbytes() const override { return 0; }
};

struct RankRow {
  std::string transport;
  bool fixed_sizes = false;
  std::int64_t num_tokens = 0;
  double dispatch_us = 0, bare_dispatch_us = 0, combine_us = 0, bare_combine_us = 0;
  double copy_us = 0;     // memcpy of what is sent and of what returns; on the CPU
  double sent_bytes = 0;  // to other ranks, by the rank that sends most
  double times_of_copy() const { return (dispatch_us + combine_us) / copy_us; }
  double gigabytes() const { return 1e-3 * sent_bytes / dispatch_us; }
};

/// One rank's part of one row.
class RankBench {
 public:
  RankBench(const RankBenchOptions& options, std::shared_ptr<Communicator> communicator,
            const PrepareFinalizeDescriptor& transport, bool fixed_sizes, std::int64_t num_tokens);
  RankRow run();

 private:
  std::vector<double> medians_us(const std::vector<std::function<void()>>& phases);
  void start_together();
  std::vector<Message> messages(bool incoming);
  static void copy_bytes(const Tensor& from, const std::vector<Message>& messages);
  double largest(double mine) const;
  std::int64_t row_bytes() const { return bytes(config_.dtype, config_.hidden); }
  /// The transport uses the data plane's own collectives.
  bool gathers() const { return uses_graphs() && transport_.name() != "all2all"; }
  bool uses_graphs() const { return fixed_sizes_ && communicator_->backend() == "nccl"; }

  const RankBenchOptions& options_;
  std::shared_ptr<Communicator> communicator_;
  const PrepareFinalizeDescriptor& transport_;
  const bool fixed_sizes_;
  const std::int64_t num_tokens_;
  Device device_;
  OwnedStream stream_;
  MoeConfig config_;
  std::shared_ptr<const PrepareAndFinalize> prepare_finalize_;
  NoWeights weights_;
  Tensor hidden_states_, ids_, factors_, output_, workspace_, rows_, bare_;
  std::vector<std::int64_t> sent_, received_;  // rows, for each rank
};

MoeConfig config_of(const RankBenchOptions& options, int rank, Device device) {
  MoeConfig config = moe_config(options.model, options.dtype, device);
  config.scheme = options.scheme;
  config.parallel =
      ParallelConfig::of({.dp_size = options.num_ranks, .expert_parallel = true, .rank = rank});
  const auto placement = ExpertPlacement::linear(config.num_experts, options.num_ranks);
  config.num_local_experts = static_cast<std::int64_t>(placement.local_experts(rank).size());
  config.has_expert_map = true;
  return config;
}

PackedWeights::Info info_of(const MoeConfig& config) {
  PackedWeights::Info info;
  info.num_experts = config.num_local_experts;
  info.hidden = config.hidden;
  info.intermediate = config.intermediate;
  info.scheme = config.scheme;
  info.device = config.device;
  return info;
}

RankBench::RankBench(const RankBenchOptions& options, std::shared_ptr<Communicator> communicator,
                     const PrepareFinalizeDescriptor& transport, bool fixed_sizes,
                     std::int64_t num_tokens)
    : options_(options),
      communicator_(std::move(communicator)),
      transport_(transport),
      fixed_sizes_(fixed_sizes),
      num_tokens_(num_tokens),
      device_(communicator_->device()),
      stream_(device_),
      config_(config_of(options, communicator_->rank(), device_)),
      weights_(info_of(config_)) {
  Context context;
  context.ranks.communicator = communicator_;
  context.ranks.max_tokens_per_rank = num_tokens;
  context.ranks.fixed_sizes = fixed_sizes;
  prepare_finalize_ = transport.create(config_, context);

  const int rank = communicator_->rank(), size = communicator_->size();
  testing::Case spec;
  spec.num_tokens = num_tokens;
  spec.num_experts = config_.num_experts;
  spec.topk = config_.topk;
  spec.hidden = spec.intermediate = 16;
  spec.seed = static_cast<std::uint64_t>(rank);
  const testing::Problem problem = testing::make_problem(spec);
  ids_ = to_device(problem.topk_ids, device_);
  factors_ = to_device(problem.topk_weights, device_);
  hidden_states_ = Tensor::zeros({num_tokens, config_.hidden}, config_.dtype, device_);
  output_ = Tensor::zeros({num_tokens, config_.hidden}, config_.dtype, device_);
  ProblemSize sizes = ProblemSize::of(config_, num_tokens);
  sizes.max_tokens = num_tokens;
  const std::size_t bytes = prepare_finalize_->workspace_bytes(sizes, {});
  workspace_ = Tensor::zeros({static_cast<std::int64_t>(bytes)}, DType::kU8, device_);
  const std::int64_t capacity = prepare_finalize_->problem_size(sizes).num_tokens;
  rows_ = Tensor::zeros({capacity, config_.hidden}, config_.dtype, device_);
  bare_ = Tensor::zeros({2 * size * num_tokens, config_.hidden}, config_.dtype, device_);
  // What nobody has written is one page of zeros, which is always in the cache.
  for (const Tensor& each : {hidden_states_, output_, workspace_, rows_, bare_}) {
    fill_bytes(each, 0x3c, stream_);
  }

  // As many rows as the step itself sends.
  const auto placement = ExpertPlacement::linear(config_.num_experts, size);
  sent_.assign(size, 0);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    std::vector<bool> goes(size, transport.name() != "all2all" || fixed_sizes);
    for (std::int64_t slot = 0; slot < config_.topk; ++slot) {
      const std::int32_t id = problem.topk_ids.as<std::int32_t>()[token * config_.topk + slot];
      goes[placement.rank_of()[id]] = true;
    }
    for (int r = 0; r < size; ++r) sent_[r] += goes[r];
  }
  std::string text;
  for (const std::int64_t rows : sent_) text += fmt::format("{} ", rows);
  received_.clear();
  for (const std::string& other : communicator_->gather(text, "bench")) {
    std::istringstream numbers(other);
    std::int64_t rows = 0;
    for (int r = 0; r <= rank; ++r) numbers >> rows;
    received_.push_back(rows);
  }
}

/// Of all ranks.
double RankBench::largest(double mine) const {
  double result = 0;
  for (const std::string& text : communicator_->gather(fmt::format("{:.17g}", mine), "bench")) {
    result = std::max(result, std::stod(text));
  }
  return result;
}

/// Behind a barrier threads wake up one after the other. On the CPU a message to everybody and one
/// from everybody wait for the last, without sleeping.
void RankBench::start_together() {
  communicator_->barrier();
  if (!device_.is_cpu()) return;
  std::vector<Message> out, in;
  char nothing[2] = {};
  for (int r = 0; r < communicator_->size(); ++r) {
    if (r == communicator_->rank()) continue;
    out.push_back({r, &nothing[0], 1});
    in.push_back({r, &nothing[1], 1});
  }
  communicator_->exchange(out, in, stream_, "bench");
}

/// The medians of phases that follow each other, each begun on all ranks together. Where a graph
/// can hold a phase, of its replays, many in a row, so that the host's part does not count.
std::vector<double> RankBench::medians_us(const std::vector<std::function<void()>>& phases) {
  const Stream stream = stream_;
  const bool graph = uses_graphs();
  for (int i = 0; i < 3; ++i) {
    for (const auto& phase : phases) phase();
  }
  synchronize(stream);
  communicator_->barrier();
  std::vector<Graph> recorded;
  for (const auto& phase : phases) {
    if (graph) recorded.emplace_back(stream, phase);
  }
  const int replays = graph ? 20 : 1;
  std::vector<std::vector<double>> times(phases.size());
  const Clock::time_point begin = Clock::now();
  while (true) {
    const double passed = std::chrono::duration<double>(Clock::now() - begin).count();
    const auto samples = static_cast<std::int64_t>(times.front().size());
    const bool enough = passed > options_.max_seconds || samples >= 5 * options_.min_samples;
    // Every rank goes on as long as one wants to.
    if (largest(samples >= options_.min_samples && enough ? 0 : 1) == 0) break;
    for (std::size_t p = 0; p < phases.size(); ++p) {
      synchronize(stream);
      start_together();
      const Clock::time_point start = Clock::now();
      for (int i = 0; i < replays; ++i) graph ? recorded[p].launch(stream) : phases[p]();
      synchronize(stream);
      const std::chrono::duration<double, std::micro> time = Clock::now() - start;
      times[p].push_back(time.count() / replays);
    }
  }
  communicator_->check();
  std::vector<double> medians;
  for (std::vector<double>& each : times) {
    std::nth_element(each.begin(), each.begin() + each.size() / 2, each.end());
    medians.push_back(largest(each[each.size() / 2]));
  }
  return medians;
}

/// The same rows without what surrounds them.
std::vector<Message> RankBench::messages(bool incoming) {
  std::vector<Message> result;
  auto* next = bare_.as<char>() + (incoming ? bare_.nbytes() / 2 : 0);
  const int size = communicator_->size();
  for (int r = 0; r < size; ++r) {
    const std::int64_t bytes = (incoming ? received_ : sent_)[r] * row_bytes();
    if (r != communicator_->rank()) result.push_back({r, next, static_cast<std::size_t>(bytes)});
    next += num_tokens_ * row_bytes();
  }
  return result;
}

/// As many bytes as the messages have, each message by one call.
void RankBench::copy_bytes(const Tensor& from, const std::vector<Message>& messages) {
  for (const Message& message : messages) std::memcpy(message.data, from.data(), message.bytes);
}

RankRow RankBench::run() {
  const Stream stream = stream_;
  ForwardArgs args;
  args.weights = &weights_;
  args.hidden_states = hidden_states_;
  args.output = output_;
  args.topk_ids = ids_;
  args.topk_weights = factors_;
  args.max_tokens = num_tokens_;
  args.num_experts = config_.num_experts;
  args.prepare_workspace = workspace_.data();
  args.stream = stream;
  const auto dispatch = [&] {
    ForwardArgs inner = args;
    prepare_finalize_->start_prepare(inner);
    prepare_finalize_->finish_prepare(inner);
    args.fused_output = rows_.slice(0, 0, inner.hidden_states.size(0));
  };
  const auto combine = [&] {
    prepare_finalize_->start_finalize(args);
    prepare_finalize_->finish_finalize(args);
  };
  const std::vector<Message> out = messages(false), in = messages(true);
  // Back goes what came.
  std::vector<Message> back_out, back_in;
  for (std::size_t i = 0; i < out.size(); ++i) {
    back_out.push_back({out[i].peer, out[i].data, in[i].bytes});
    back_in.push_back({in[i].peer, in[i].data, out[i].bytes});
  }
  RankRow row;
  row.transport = transport_.name();
  row.fixed_sizes = fixed_sizes_;
  row.num_tokens = num_tokens_;
  for (const Message& message : out) row.sent_bytes += static_cast<double>(message.bytes);
  row.sent_bytes = largest(row.sent_bytes);
  // In turns with the steps, so that caches hold as little of what is copied.
  const auto copy_sent = [&] { copy_bytes(hidden_states_, out); };
  const auto copy_returned = [&] { copy_bytes(rows_, back_out); };
  std::vector<std::function<void()>> phases{dispatch, combine};
  if (device_.is_cpu()) phases.insert(phases.end(), {copy_sent, copy_returned});
  const std::vector<double> step = medians_us(phases);
  row.dispatch_us = step[0];
  row.combine_us = step[1];
  if (device_.is_cpu()) row.copy_us = step[2] + step[3];
  const auto bare_dispatch = [&] {
    if (!gathers()) return communicator_->exchange(out, in, stream, "bench");
    const Gather all{bare_.data(), static_cast<std::size_t>(num_tokens_ * row_bytes())};
    communicator_->all_gather({&all, 1}, stream);
  };
  const auto bare_combine = [&] {
    if (!gathers()) return communicator_->exchange(back_out, back_in, stream, "bench");
    communicator_->reduce_scatter(bare_.data(), bare_.as<char>() + bare_.nbytes() / 2,
                                  num_tokens_ * config_.hidden, config_.dtype, stream);
  };
  row.bare_dispatch_us = medians_us({bare_dispatch}).front();
  row.bare_combine_us = medians_us({bare_combine}).front();
  return row;
}

void print_table(const RankBenchOptions& options, std::string_view backend,
                 const std::vector<RankRow>& rows) {
  fmt::print("{} ranks over {}, hidden {}, topk {} of {}, {}\n\n", options.num_ranks, backend,
             options.model.hidden, options.model.router.topk, options.model.router.num_experts,
             name(options.dtype));
  const bool copies = rows.front().copy_us > 0;
  fmt::print("{:<24} {:<6} {:>7} {:>9} {:>9} {:>6} {:>9} {:>9} {:>6} {:>9} {:>7}{}\n", "transport",
             "sizes", "tokens", "dispatch", "bare", "ratio", "combine", "bare", "ratio", "sent MB",
             "GB/s", copies ? fmt::format(" {:>9} {:>6}", "memcpy", "ratio") : "");
  for (const RankRow& row : rows) {
    fmt::print(
        "{:<24} {:<6} {:>7} {:>6.1f} us {:>6.1f} us {:>6.2f} {:>6.1f} us {:>6.1f} us "
        "{:>6.2f} {:>9.3f} {:>7.1f}",
        row.transport, row.fixed_sizes ? "fixed" : "exact", row.num_tokens, row.dispatch_us,
        row.bare_dispatch_us, row.dispatch_us / row.bare_dispatch_us, row.combine_us,
        row.bare_combine_us, row.combine_us / row.bare_combine_us, 1e-6 * row.sent_bytes,
        row.gigabytes());
    if (copies) fmt::print(" {:>6.1f} us {:>6.2f}", row.copy_us, row.times_of_copy());
    fmt::print("\n");
  }
  if (copies) {
    fmt::print(
        "\nbare: the data plane alone for the same bytes. memcpy: one copy of what is sent "
        "and one of what returns;\nits ratio is (dispatch + combine) / memcpy.\n");
  }
}

void print_json(const RankBenchOptions& options, std::string_view backend,
                const std::vector<RankRow>& rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const RankRow& row : rows) {
    list.push_back({{"ranks", options.num_ranks},
                    {"backend", backend},
                    {"transport", row.transport},
                    {"sizes", row.fixed_sizes ? "fixed" : "exact"},
                    {"num_tokens", row.num_tokens},
                    {"dispatch_us", row.dispatch_us},
                    {"bare_dispatch_us", row.bare_dispatch_us},
                    {"combine_us", row.combine_us},
                    {"bare_combine_us", row.bare_combine_us},
                    {"sent_bytes", row.sent_bytes},
                    {"gigabytes_per_second", row.gigabytes()}});
    if (row.copy_us > 0) list.back()["memcpy_us"] = row.copy_us;
  }
  fmt::print("{}\n", list.dump());
}

}  // namespace

void run_rank_bench(const RankBenchOptions& options) {
  std::vector<RankRow> rows;
  std::string backend;
  run_on_ranks(options.num_ranks, options.device, [&](std::shared_ptr<Communicator> rank) {
    if (launched() && options.threads == 0) set_num_threads(threads_of_rank(*rank));
    for (const PrepareFinalizeDescriptor* transport : {&all2all(), &allgather_reducescatter()}) {
      if (!options.transport.empty() && options.transport != transport->name()) continue;
      for (const bool fixed_sizes : {false, true}) {
        for (const std::int64_t tokens : options.tokens) {
          const RankRow row = RankBench(options, rank, *transport, fixed_sizes, tokens).run();
          if (rank->rank() > 0) continue;
          backend = rank->backend();
          rows.push_back(row);
        }
      }
    }
  });
  if (rows.empty()) return;  // rank 0, another process, has them
  (options.json ? print_json : print_table)(options, backend, rows);
}

}  // namespace fusedmoe::cli
