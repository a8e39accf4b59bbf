// Order between GPUs: whoever writes for others ends with a release of system scope (the signal),
// whoever reads begins with an acquire (the wait), and what lies between in the same block or
// behind it in the stream comes after. Rows of other GPUs are read past the L1.
#include "cuda/peers/steps.h"

#include <algorithm>
#include <utility>

#include "core/ceil_div.h"
#include "core/check.h"
#include "cuda/device/launch.h"
#include "cuda/device/overlap.cuh"
#include "cuda/peers/device_words.cuh"
#include "cuda/rows/element.cuh"
#include "moe/local_experts.h"

namespace fusedmoe::cuda {
namespace {

/// Threads that work on one row, or on one chunk of a sum. A block has several such teams where
/// there is much to do: as all blocks look at the same words while they wait, there are no more of
/// them than multiprocessors.
template <int kSize>
struct Team {
  static constexpr int kThreads = kSize;
  static constexpr int kMost = 1024 / kThreads;

  int thread = static_cast<int>(threadIdx.x) % kThreads;
  int first = static_cast<int>(blockIdx.x * (blockDim.x / kThreads) + threadIdx.x / kThreads);
  int step = static_cast<int>(gridDim.x * (blockDim.x / kThreads));
};
using RowTeam = Team<256>;  // which reads a row of 14 KB at once
using SumTeam = Team<128>;
constexpr int kMostThreads = 1024;

struct StepParams {
  PeerPlace place;
  StepKey fixed_key;               // without the placement
  const std::uint32_t* placement;  // as in PeerStep
  std::int32_t topk, most_tokens;
  std::int64_t ids, weights;  // as in PeerStep

  __device__ StepKey key() const {
    StepKey key = fixed_key;
    key.placement = *placement;
    return key;
  }
};

StepParams step_params(const PeerPlace& place, const PeerStep& step) {
  StepParams p{};
  p.place = place;
  p.fixed_key = {step.layer, static_cast<std::uint32_t>(step.most_tokens),
                 static_cast<std::uint32_t>(step.topk), static_cast<std::uint32_t>(step.row_bytes)};
  p.placement = step.placement;
  p.topk = static_cast<std::int32_t>(step.topk);
  p.most_tokens = static_cast<std::int32_t>(step.most_tokens);
  p.ids = step.ids;
  p.weights = step.weights;
  return p;
}

template <typename Value>
__device__ Value* in_arena(const Peers& peers, int rank, std::int64_t offset) {
  return reinterpret_cast<Value*>(reinterpret_cast<char*>(peers.arenas[rank]) + offset);
}

/// By all threads of a block: waits until all ranks have come to the round. False, for all of them:
/// the step has failed.
__device__ bool await_all(const StepParams& p, Round round) {
  const Peers& peers = p.place.peers;
  const int from = static_cast<int>(threadIdx.x);
  const bool here =
      from >= peers.size ||
      await_signal<DeviceWords>(peers, round, p.key(), from, p.place.patience, blockIdx.x == 0);
  if (__syncthreads_and(here)) return true;
  if (threadIdx.x == 0) give_up<DeviceWords>(peers, round, p.key(), *p.place.record);
  return false;
}

/// By all threads of a block, behind what other ranks may read: the last block of the grid tells
/// them all. What each block has written is with the other ranks before its ticket is drawn.
__device__ void signal_when_all_done(const StepParams& p, Round round) {
  const Peers& peers = p.place.peers;
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    is_last = gridDim.x == 1 || atomicAdd(&peers.own().ticket, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  if (threadIdx.x == 0) peers.own().ticket = 0;
  const int to = static_cast<int>(threadIdx.x);
  if (to < peers.size) send_signal<DeviceWords>(peers, round, p.key(), to);
}

/// What another GPU may have written.
__device__ uint4 load_far(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
template <typename Unit>
__device__ Unit load_far(const Unit* from) {
  return *const_cast<const volatile Unit*>(from);
}

/// `is_dead`, which may still be on its way when the loads begin: nothing is written.
template <typename Unit, bool kFar>
__device__ void copy_units(const char* from, char* to, int row_bytes, int thread,
                           std::uint32_t is_dead) {
  constexpr int kThreads = RowTeam::kThreads, kBatch = 4;  // of a thread, read at the same time
  const auto* source = reinterpret_cast<const Unit*>(from);
  auto* target = reinterpret_cast<Unit*>(to);
  const int units = row_bytes / static_cast<int>(sizeof(Unit));
  for (int first = thread; first < units; first += kBatch * kThreads) {
    Unit values[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int unit = first + b * kThreads;
      if (unit < units) values[b] = kFar ? load_far(source + unit) : source[unit];
    }
    if (is_dead != 0) return;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int unit = first + b * kThreads;
      if (unit < units) target[unit] = values[b];
    }
  }
}

/// Rows of one tensor, here and in every arena.
struct TravellingRows {
  char* here;  // of tokens, or of received rows
  std::int64_t pitch, arena;
  std::int32_t row_bytes, unit;

  template <bool kFar>
  __device__ void copy(const char* from, char* to, int thread, std::uint32_t is_dead = 0) const {
    if (unit == 16) {
      copy_units<uint4, kFar>(from, to, row_bytes, thread, is_dead);
    } else if (unit == 4) {
      copy_units<std::uint32_t, kFar>(from, to, row_bytes, thread, is_dead);
    } else {
      copy_units<std::uint8_t, kFar>(from, to, row_bytes, thread, is_dead);
    }
  }
};

struct Travelling {
  TravellingRows tensors[PeerStep::kMostTensors];
  int count;
};

Travelling travelling(const PeerStep& step, std::span<const TensorView> tensors) {
  Travelling result{};
  for (const TensorView& tensor : tensors) {
    const int t = result.count++;
    TravellingRows& rows = result.tensors[t];
    rows.here = const_cast<char*>(tensor.as<const char>());
    rows.pitch = bytes(tensor.dtype(), tensor.stride(0));
    rows.arena = step.rows[t];
    rows.row_bytes = static_cast<std::int32_t>(bytes(tensor.dtype(), tensor.size(1)));
    const auto all = reinterpret_cast<std::uintptr_t>(rows.here) |
                     static_cast<std::uintptr_t>(rows.pitch | rows.arena | rows.row_bytes);
    rows.unit = all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
  }
  return result;
}

struct PublishParams {
  StepParams step;
  Travelling rows;
  const std::int32_t* ids;
  const float* weights;
  core::ReplicaTable replicas;
  std::int32_t num_tokens;
};

/// Copies the rows to this rank's arena, ids and weights to all. Behind the tokens that there are,
/// ids are -1.
__global__ void __launch_bounds__(kMostThreads)
    publish_kernel(const __grid_constant__ PublishParams p) {
  const StepParams& s = p.step;
  const Peers& peers = s.place.peers;
  const std::uint32_t is_dead = DeviceWords::load(&peers.own().dead);
  if (blockIdx.x == 0 && threadIdx.x == 0) begin_step<DeviceWords>(peers);
  const RowTeam team;
  for (int token = team.first; token < s.most_tokens; token += team.step) {
    const bool is_token = token < p.num_tokens;
    for (int i = team.thread; i < peers.size * s.topk; i += RowTeam::kThreads) {
      const int to = i / s.topk, j = i % s.topk;
      const std::int64_t from = std::int64_t{token} * s.topk + j;
      const std::int64_t slot = std::int64_t{peers.rank} * s.most_tokens * s.topk + from;
      const std::int32_t id = is_token ? p.replicas.choose(p.ids[from], token) : -1;
      const float weight = is_token ? p.weights[from] : 0;
      if (is_dead != 0) return;
      in_arena<std::int32_t>(peers, to, s.ids)[slot] = id;
      in_arena<float>(peers, to, s.weights)[slot] = weight;
    }
    for (int t = 0; is_token && t < p.rows.count; ++t) {
      const TravellingRows& rows = p.rows.tensors[t];
      rows.copy<false>(
          rows.here + token * rows.pitch,
          in_arena<char>(peers, peers.rank, rows.arena) + std::int64_t{token} * rows.row_bytes,
          team.thread, is_dead);
    }
  }
  if (is_dead != 0) return;
  signal_when_all_done(s, Round::kDispatch);
}

struct PullParams {
  StepParams step;
  Travelling rows;
  core::LocalExperts local_experts;
  std::int32_t* slot_rows;
  float* ones;
  std::int32_t* local_slots;
};

/// Neighbouring teams take rows of different ranks, beginning behind this one, so that no rank is
/// read by all at once.
__device__ void fetch_rows(const PullParams& p) {
  const StepParams& s = p.step;
  const Peers& peers = s.place.peers;
  const auto* ids = in_arena<const std::int32_t>(peers, peers.rank, s.ids);
  const int all = peers.size * s.most_tokens;
  const RowTeam team;
  const int lane = team.thread % 32;
  for (int i = team.first; i < all; i += team.step) {
    const int source = (i + 1 + peers.rank) % peers.size, token = i / peers.size;
    const std::int64_t row = std::int64_t{source} * s.most_tokens + token;
    int found = 0;  // by each warp
    for (int first = 0; first < s.topk; first += 32) {
      const int j = first + lane;
      const std::int64_t slot = row * s.topk + j;
      const bool is_here = j < s.topk && p.local_experts(ids[slot]) >= 0;
      found += __popc(__ballot_sync(~0U, is_here));
      if (team.thread >= 32 || j >= s.topk) continue;
      if (p.slot_rows) p.slot_rows[slot] = is_here ? static_cast<std::int32_t>(slot) : -1;
      if (p.ones) p.ones[slot] = 1;
    }
    if (found == 0) continue;
    if (p.local_slots && team.thread == 0) atomicAdd(p.local_slots, found);
    for (int t = 0; t < p.rows.count; ++t) {
      const TravellingRows& rows = p.rows.tensors[t];
      rows.copy<true>(
          in_arena<const char>(peers, source, rows.arena) + std::int64_t{token} * rows.row_bytes,
          rows.here + row * rows.pitch, team.thread);
    }
  }
}
__global__ void __launch_bounds__(kMostThreads) pull_kernel(const __grid_constant__ PullParams p) {
  if (await_all(p.step, Round::kDispatch)) fetch_rows(p);
}

/// Behind the experts. Begins when they end, and so a little earlier than without overlap.
__global__ void tell_results_kernel(const __grid_constant__ StepParams p) {
  wait_for_previous_launch();
  const int to = static_cast<int>(threadIdx.x);
  if (to < p.place.peers.size) {
    send_signal<DeviceWords>(p.place.peers, Round::kReturn, p.key(), to);
  }
}

template <typename Output>
struct SumParams {
  StepParams step;
  Output* output;
  std::int64_t output_stride, results;
  const std::int32_t* ids;
  const std::int32_t* physical_ranks;
  const float* weights;  // null: 1
  std::int32_t num_tokens, num_physical, hidden, chunks, parts;
  bool per_slot, accumulate;

  /// The rank of a slot's expert; -1: nobody's.
  __device__ int rank_of(std::int64_t slot) const {
    const std::int32_t id = ids[slot];
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

/// A team adds a chunk of a token's columns. The rows of kBatch parts are on their way at once.
template <typename Row, typename Output, int kWidth>
__device__ void add_chunk(const SumParams<Output>& p, int token, int column, std::uint32_t ranks) {
  constexpr int kBatch = 4;
  const StepParams& s = p.step;
  const Peers& peers = s.place.peers;
  const std::int64_t first_slot = std::int64_t{token} * s.topk;
  float sums[kWidth] = {};
  for (int first = 0; first < p.parts; first += kBatch) {
    const Row* at[kBatch];
    float weight[kBatch];
    Pack<Row, kWidth> rows[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int part = first + b;
      const bool is_part = part < p.parts;
      const int rank = !is_part     ? -1
                       : p.per_slot ? p.rank_of(first_slot + part)
                                    : ((ranks >> part & 1) != 0 ? part : -1);
      std::int64_t row = std::int64_t{peers.rank} * s.most_tokens + token;
      if (p.per_slot) row = row * s.topk + part;
      at[b] = rank < 0 ? nullptr
                       : in_arena<const Row>(peers, rank, p.results) + row * p.hidden + column;
      weight[b] = rank >= 0 && p.weights ? p.weights[first_slot + part] : 1.0f;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      using Unit = std::conditional_t<
          sizeof(rows[b]) == 16, uint4,
          std::conditional_t<sizeof(rows[b]) == 4, std::uint32_t, std::uint16_t>>;
      if (!at[b]) continue;
      const Unit unit = load_far(reinterpret_cast<const Unit*>(at[b]));
      memcpy(&rows[b], &unit, sizeof unit);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (!at[b]) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sums[i] = fmaf(weight[b], to_f32(rows[b].values[i]), sums[i]);
      }
    }
  }
  store_sums(sums, p.output + token * p.output_stride + column, p.accumulate);
}
template <typename Row, typename Output, int kWidth>
__global__ void __launch_bounds__(kMostThreads)
    sum_results_kernel(const __grid_constant__ SumParams<Output> p) {
  const SumTeam team;
  // What does not depend on other ranks is read while waiting.
  std::uint32_t next_ranks = p.ranks_of(team.first / p.chunks);
  if (!await_all(p.step, Round::kReturn)) return;
  for (int i = team.first; i < p.num_tokens * p.chunks; i += team.step) {
    const std::uint32_t ranks = next_ranks;
    next_ranks = p.ranks_of((i + team.step) / p.chunks);
    const int column = (i % p.chunks * SumTeam::kThreads + team.thread) * kWidth;
    if (column < p.hidden) add_chunk<Row, Output, kWidth>(p, i / p.chunks, column, ranks);
  }
}

__global__ void read_marks_kernel(const Peers peers, std::uint64_t* marks) {
  const int rank = static_cast<int>(threadIdx.x);
  if (rank < peers.size) marks[rank] = DeviceWords::load_acquire(&peers.arenas[rank]->mark);
}

/// For work of so many pieces, a team for each where there is room. One block at least: somebody
/// has to wait and to tell.
template <typename Team, typename Kernel, typename Params>
void launch_teams(Kernel kernel, std::int64_t pieces, Stream stream, const Params& params) {
  const std::int64_t most = multiprocessor_count(stream.device);
  const std::int64_t teams = std::clamp<std::int64_t>(core::ceil_div(pieces, most), 1, Team::kMost);
  const std::int64_t blocks = std::clamp<std::int64_t>(core::ceil_div(pieces, teams), 1, most);
  launch(kernel, dim3(static_cast<unsigned>(blocks)),
         dim3(static_cast<unsigned>(teams * Team::kThreads)), 0, stream, false, params);
}

template <typename... Params>
void load(void (*kernel)(Params...)) {
  cudaFuncAttributes attributes{};
  FUSEDMOE_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
}

}  // namespace

void publish_rows(const PeerPlace& place, const PeerStep& step, const PublishedRows& rows,
                  Stream stream) {
  PublishParams p{};
  p.step = step_params(place, step);
  p.rows = travelling(step, rows.tensors);
  p.ids = rows.ids.as<const std::int32_t>();
  p.weights = rows.weights.as<const float>();
  p.replicas = rows.replicas;
  p.num_tokens = static_cast<std::int32_t>(rows.ids.size(0));
  launch_teams<RowTeam>(publish_kernel, step.most_tokens, stream, p);
}

void pull_rows(const PeerPlace& place, const PeerStep& step, const PulledRows& rows,
               Stream stream) {
  PullParams p{};
  p.step = step_params(place, step);
  p.rows = travelling(step, rows.tensors);
  p.local_experts = core::LocalExperts(rows.expert_map, rows.num_local_experts);
  p.slot_rows = rows.slot_rows.as<std::int32_t>();
  p.ones = rows.ones.as<float>();
  p.local_slots = rows.local_slots.as<std::int32_t>();
  launch_teams<RowTeam>(pull_kernel, place.peers.size * step.most_tokens, stream, p);
}

void tell_results(const PeerPlace& place, const PeerStep& step, Stream stream) {
  launch(tell_results_kernel, dim3(1), dim3(32), 0, stream, true, step_params(place, step));
}

void sum_results(const PeerPlace& place, const PeerStep& step, const PeerSum& sum, Stream stream) {
  const std::int64_t num_tokens = sum.output.size(0), hidden = sum.output.size(1);
  const auto launch_kernel = [&](auto row, auto result) {
    using Row = decltype(row);
    using Output = decltype(result);
    SumParams<Output> p{};
    p.step = step_params(place, step);
    p.output = sum.output.as<Output>();
    p.output_stride = num_tokens > 0 ? sum.output.stride(0) : hidden;
    p.results = step.results;
    p.ids = sum.ids.as<const std::int32_t>();
    p.physical_ranks = sum.physical_ranks.as<const std::int32_t>();
    p.weights = sum.weights.as<const float>();
    p.num_tokens = static_cast<std::int32_t>(num_tokens);
    p.num_physical = static_cast<std::int32_t>(sum.physical_ranks.numel());
    p.hidden = static_cast<std::int32_t>(hidden);
    p.parts = sum.per_slot ? p.step.topk : place.peers.size;
    p.per_slot = sum.per_slot;
    p.accumulate = sum.accumulate;
    const auto* results = reinterpret_cast<const char*>(&place.peers.own()) + step.results;
    dispatch_width<Row>(
        hidden,
        [&](auto width) {
          constexpr int kWidth = decltype(width)::value;
          p.chunks = static_cast<std::int32_t>(
              core::ceil_div(hidden, std::int64_t{kWidth} * SumTeam::kThreads));
          launch_teams<SumTeam>(sum_results_kernel<Row, Output, kWidth>, num_tokens * p.chunks,
                                stream, p);
        },
        results, p.output, p.output + p.output_stride);
  };
  dispatch_row_and_output(sum.results, sum.output.dtype(), launch_kernel);
}

void read_marks(const Peers& peers, std::uint64_t* marks, Stream stream) {
  launch(read_marks_kernel, dim3(1), dim3(32), 0, stream, false, peers, marks);
}

void load_step_kernels() {
  load(publish_kernel);
  load(pull_kernel);
  load(tell_results_kernel);
  load(read_marks_kernel);
  using enum DType;
  constexpr std::pair<DType, DType> kPairs[] = {{kF32, kF32},   {kF32, kBF16}, {kF32, kF16},
                                                {kBF16, kBF16}, {kBF16, kF32}, {kF16, kF16},
                                                {kF16, kF32}};
  for (const auto& [row, output] : kPairs) {
    dispatch_row_and_output(row, output, [](auto from, auto to) {
      using Row = decltype(from);
      load(sum_results_kernel<Row, decltype(to), 1>);
      load(sum_results_kernel<Row, decltype(to), 16 / static_cast<int>(sizeof(Row))>);
    });
  }
}

}  // namespace fusedmoe::cuda
