#include "core/check.h"
#include "cuda/device/overlap.cuh"
#include "cuda/peers/add_parts.cuh"

namespace fusedmoe::cuda {
namespace {

template <typename Output>
struct SumParams {
  StepParams step;
  Output* output;
  std::int64_t output_stride, results;
  const std::int32_t* physical_ranks;
  const float* weights;  // null: 1
  std::int32_t num_tokens, num_physical, hidden, chunks, parts;
  bool per_slot, accumulate;
  bool tells;  // that the experts have ended: nobody else does

  /// The rank of a slot's expert; -1: nobody's.
  __device__ int rank_of(std::int64_t slot) const {
    const Peers& peers = step.context.peers;
    const auto id = static_cast<std::int32_t>(
        load_far(in_arena<const std::int32_t>(peers, peers.rank, step.own_ids) + slot));
    return id < 0 || id >= num_physical ? -1 : physical_ranks[id];
  }
  /// The ranks that have an expert of a token, as bits; with per_slot nobody needs them.
  __device__ std::uint32_t ranks_of(int token) const {
    std::uint32_t ranks = 0;
    if (per_slot || token >= num_tokens) return ranks;
    for (int j = 0; j < step.topk; ++j) {
      const int rank = rank_of(std::int64_t{token} * step.topk + j);
      if (rank >= 0) ranks |= 1U << rank;
    }
    return ranks;
  }
};

/// A team adds a chunk of a token's columns.
template <typename Row, typename Output, int kWidth>
__device__ void add_chunk(const SumParams<Output>& p, int token, int column, std::uint32_t ranks) {
  const StepParams& s = p.step;
  const Peers& peers = s.context.peers;
  const std::int64_t first_slot = std::int64_t{token} * s.topk;
  float sums[kWidth] = {};
  add_parts<Row>(sums, p.parts, [&](int part) -> SumPart<Row> {
    const int rank =
        p.per_slot ? p.rank_of(first_slot + part) : ((ranks >> part & 1) != 0 ? part : -1);
    if (rank < 0) return {};
    const std::int64_t row =
        p.per_slot ? first_slot + part : std::int64_t{rank} * s.most_tokens + token;
    return {in_arena<const Row>(peers, peers.rank, p.results) + row * p.hidden + column,
            p.weights ? p.weights[first_slot + part] : 1.0f};
  });
  store_sums(sums, p.output + token * p.output_stride + column, p.accumulate);
}
/// May begin while the results are told: by then the experts, and all before them, have ended.
/// Where it tells them by itself it waits for the experts first: else its blocks, which wait, would
/// occupy multiprocessors that the experts need.
template <typename Row, typename Output, int kWidth>
__global__ void __launch_bounds__(kMostThreads)
    sum_results_kernel(const __grid_constant__ SumParams<Output> p) {
  const SumTeam team;
  if (p.tells) {
    wait_for_previous_launch();
    if (blockIdx.x == 0) {
      tell_return<DeviceWords>(p.step.context.peers, p.step.key(), static_cast<int>(threadIdx.x));
    }
  }
  // What does not depend on other ranks is read while waiting.
  std::uint32_t next_ranks = p.ranks_of(team.first / p.chunks);
  if (await_all(p.step, Round::kReturn)) {
    for (int i = team.first; i < p.num_tokens * p.chunks; i += team.step) {
      const std::uint32_t ranks = next_ranks;
      next_ranks = p.ranks_of((i + team.step) / p.chunks);
      const int column = (i % p.chunks * SumTeam::kThreads + team.thread) * kWidth;
      if (column < p.hidden) add_chunk<Row, Output, kWidth>(p, i / p.chunks, column, ranks);
    }
  }
  wait_for_previous_launch();
}

}  // namespace

void sum_results(const PeerContext& context, const PeerStep& step, const PeerSum& sum,
                 SumFollows follows, Stream stream) {
  const std::int64_t num_tokens = sum.output.size(0), hidden = sum.output.size(1);
  const auto launch_kernel = [&](auto row, auto result) {
    using Row = decltype(row);
    using Output = decltype(result);
    SumParams<Output> p{};
    p.step = step_params(context, step);
    p.output = sum.output.as<Output>();
    p.output_stride = num_tokens > 0 ? sum.output.stride(0) : hidden;
    p.results = step.results;
    p.physical_ranks = sum.physical_ranks.as<const std::int32_t>();
    p.weights = sum.weights.as<const float>();
    p.num_tokens = static_cast<std::int32_t>(num_tokens);
    p.num_physical = static_cast<std::int32_t>(sum.physical_ranks.numel());
    p.hidden = static_cast<std::int32_t>(hidden);
    p.parts = sum.per_slot ? p.step.topk : context.peers.size;
    p.per_slot = sum.per_slot;
    p.accumulate = sum.accumulate;
    p.tells = follows == SumFollows::kExperts;
    const auto* results = reinterpret_cast<const char*>(&context.peers.own()) + step.results;
    launch_sum<Row>([](auto width) { return sum_results_kernel<Row, Output, width>; }, p,
                    num_tokens, follows != SumFollows::kOther, false, stream, results, p.output,
                    p.output + p.output_stride);
  };
  dispatch_row_and_output(sum.results, sum.output.dtype(), launch_kernel);
}

void load_sum_kernels() {
  each_row_and_output([](auto from, auto to) {
    using Row = decltype(from);
    load_kernel(sum_results_kernel<Row, decltype(to), 1>);
    load_kernel(sum_results_kernel<Row, decltype(to), 16 / static_cast<int>(sizeof(Row))>);
  });
}

}  // namespace fusedmoe::cuda
