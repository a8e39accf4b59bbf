// The sum of what ranks with the same tokens have: one kernel leaves this rank's parts where the
// others read them, tells them, waits for theirs and adds. Or one does the first two, and another
// the rest. Many tokens are added in pieces. The kernel of a piece also leaves and tells the parts
// of the next: so they have come when the next kernel wants them.
#include "cuda/device/overlap.cuh"
#include "cuda/peers/add_parts.cuh"
#include "cuda/peers/sum_layout.h"

namespace fusedmoe::cuda {
namespace {

template <typename Row, typename Output>
struct PartsParams {
  StepParams step;
  const Row* partial;
  Output* output;
  std::int64_t output_stride;
  std::int32_t num_tokens, hidden, chunks;
  // Those behind this piece, and how many of them are the next piece. Ranks agree about all tokens
  // from their piece on: else they would differ unnoticed in how many pieces there are.
  std::int32_t tokens_behind, next_tokens;
  // Of the tokens, which a rank adds for all; 0: each rank adds all for itself, and nothing is
  // next.
  std::int32_t share;
  bool accumulate, tells, adds;

  /// Calls function(token, column) for what this thread does of so many tokens.
  template <int kWidth, typename Function>
  __device__ void each(int tokens, const Function& function) const {
    const SumTeam team;
#pragma unroll 1  // enough loads are in flight, and registers are few
    for (int i = team.first; i < tokens * chunks; i += team.step) {
      const int column = (i % chunks * SumTeam::kThreads + team.thread) * kWidth;
      if (column < hidden) function(i / chunks, column);
    }
  }
  __device__ std::int64_t at(int token, int column) const {
    return std::int64_t{token} * hidden + column;
  }
};

/// A total is rounded to the dtype of the parts before it is added to anything.
template <typename Row, int kWidth>
__device__ void round_to(float (&sums)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[i] = 0.0f + to_f32(from_f32<Row>(sums[i]));
}

template <typename Row, typename Output, int kWidth>
__global__ void __launch_bounds__(kMostThreads)
    sum_parts_kernel(const __grid_constant__ PartsParams<Row, Output> p) {
  const StepParams& s = p.step;
  const Peers& peers = s.context.peers;
  wait_for_previous_launch();
  const std::uint32_t is_dead = DeviceWords::load(&peers.own().dead);
  // A launch that only adds comes behind the one that has told, and ended its number.
  const std::uint32_t before = number_before(s, Round::kParts) - (p.tells ? 0 : 1);
  const auto parts_of = [&](int rank, std::uint32_t number) {
    return in_arena<Row>(peers, rank, parts_begin(number));
  };
  const auto totals_of = [&](int rank) { return in_arena<Row>(peers, rank, totals_begin(before)); };
  const auto store = [&](float(&sums)[kWidth], int token, int column) {
    store_sums(sums, p.output + token * p.output_stride + column, p.accumulate);
  };

  const auto leave = [&](const Row* rows, int num_tokens, std::uint32_t number) {
    p.template each<kWidth>(num_tokens, [&](int token, int column) {
      const auto row = Pack<Row, kWidth>::load(rows + p.at(token, column));
      if (is_dead == 0) row.store(parts_of(peers.rank, number) + p.at(token, column));
    });
  };
  const auto tell = [&](int tokens_from_there, std::uint32_t number) {
    StepKey key = s.key();
    key.most_tokens = static_cast<std::uint32_t>(tokens_from_there);
    const bool is_last = signal_when_all_done(s, Round::kParts, key, number);
    if (is_last && threadIdx.x == 0) end_sum<DeviceWords>(peers, number);
  };
  if (p.tells) {
    leave(p.partial, p.num_tokens, before);
    if (is_dead != 0) return;
    tell(p.num_tokens + p.tokens_behind, before);
  }
  if (!p.adds || !await_all(s, Round::kParts, before)) return;

  const auto add = [&](float(&sums)[kWidth], int token, int column) {
    add_parts<Row>(sums, peers.size, [&](int rank) -> SumPart<Row> {
      return {parts_of(rank, before) + p.at(token, column)};
    });
  };
  if (p.share == 0) {
    p.template each<kWidth>(p.num_tokens, [&](int token, int column) {
      float sums[kWidth] = {};
      add(sums, token, column);
      round_to<Row>(sums);
      store(sums, token, column);
    });
    return;
  }
  const int first = min(peers.rank * p.share, p.num_tokens);
  p.template each<kWidth>(min(p.share, p.num_tokens - first), [&](int token, int column) {
    float sums[kWidth] = {};
    add(sums, first + token, column);
    store_sums(sums, totals_of(peers.rank) + p.at(token, column), false);
  });
  signal_when_all_done(s, Round::kTotals, s.key(), before);
  // The next parts come where those of the piece before this one were. All ranks have read these:
  // they had before they told the parts of this piece.
  leave(p.partial + p.at(p.num_tokens, 0), p.next_tokens, before + 1);
  if (!await_all(s, Round::kTotals, before)) return;
  // Not earlier: else a rank could come to its next totals, and put their signal over that of
  // these, while another still waits for it.
  if (p.tokens_behind > 0) tell(p.tokens_behind, before + 1);
  p.template each<kWidth>(p.num_tokens, [&](int token, int column) {
    float sums[kWidth] = {};
    const Row* const total = totals_of(token / p.share) + p.at(token % p.share, column);
    add_parts<Row>(sums, 1, [&](int) -> SumPart<Row> { return {total}; });
    store(sums, token, column);
  });
}

}  // namespace

void sum_parts(const PeerContext& context, const PeerParts& parts, std::int64_t tokens_behind,
               SumPhases phases, Stream stream) {
  const std::int64_t num_tokens = parts.partial.size(0), hidden = parts.partial.size(1);
  const std::int64_t row_bytes = bytes(parts.partial.dtype(), hidden);
  PeerStep step;
  step.layer = parts.layer;
  step.placement = parts.placement;
  step.most_tokens = num_tokens + tokens_behind;
  step.row_bytes = row_bytes;
  const int ranks = context.peers.size;
  const auto launch_kernel = [&](auto row, auto result) {
    using Row = decltype(row);
    using Output = decltype(result);
    PartsParams<Row, Output> p{};
    p.step = step_params(context, step);
    p.partial = parts.partial.as<const Row>();
    p.output = parts.output.as<Output>();
    p.output_stride = num_tokens > 0 ? parts.output.stride(0) : hidden;
    p.num_tokens = static_cast<std::int32_t>(num_tokens);
    p.tokens_behind = static_cast<std::int32_t>(tokens_behind);
    p.next_tokens = static_cast<std::int32_t>(std::min(tokens_behind, most_sum_rows(row_bytes)));
    p.hidden = static_cast<std::int32_t>(hidden);
    p.accumulate = parts.accumulate;
    p.tells = phases == SumPhases::kTell || phases == SumPhases::kAll;
    p.adds = phases != SumPhases::kTell;
    if (takes_two_shots(ranks, num_tokens * row_bytes, tokens_behind > 0)) {
      p.share = static_cast<std::int32_t>(core::ceil_div(num_tokens, ranks));
    }
    launch_sum<Row>([](auto width) { return sum_parts_kernel<Row, Output, width>; }, p, num_tokens,
                    phases != SumPhases::kAdd && num_tokens > 0, true, stream, p.partial, p.output,
                    p.output + p.output_stride);
  };
  dispatch_row_and_output(parts.partial.dtype(), parts.output.dtype(), launch_kernel);
}

void load_parts_kernels() {
  each_row_and_output([](auto from, auto to) {
    using Row = decltype(from);
    load_kernel(sum_parts_kernel<Row, decltype(to), 1>);
    load_kernel(sum_parts_kernel<Row, decltype(to), 16 / static_cast<int>(sizeof(Row))>);
  });
}

}  // namespace fusedmoe::cuda
