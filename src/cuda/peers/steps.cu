#include "cuda/peers/steps.h"

#include <cmath>

#include "cuda/device/overlap.cuh"
#include "cuda/peers/step_kernels.cuh"
#include "moe/local_experts.h"

namespace fusedmoe::cuda {
namespace {

using RowTeam = Team<256>;  // which reads a row of 14 KB at once

/// By a team. Reads before it asks whether the row is wanted, which may be found out meanwhile, by
/// whole warps. Else nothing is written.
template <typename Unit, bool kFar, typename IsWanted>
__device__ void copy_units(const char* from, char* to, int row_bytes, int thread,
                           const IsWanted& is_wanted) {
  constexpr int kThreads = RowTeam::kThreads, kBatch = 4;  // of a thread, read at the same time
  const auto* source = reinterpret_cast<const Unit*>(from);
  auto* target = reinterpret_cast<Unit*>(to);
  const int units = row_bytes / static_cast<int>(sizeof(Unit));
  for (int begin = 0; begin < units; begin += kBatch * kThreads) {
    const int first = begin + thread;
    Unit values[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int unit = first + b * kThreads;
      if (unit < units) values[b] = kFar ? load_far(source + unit) : source[unit];
    }
    if (!is_wanted()) return;
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

  template <bool kFar, typename IsWanted>
  __device__ void copy(const char* from, char* to, int thread, const IsWanted& is_wanted) const {
    if (unit == 16) {
      copy_units<uint4, kFar>(from, to, row_bytes, thread, is_wanted);
    } else if (unit == 4) {
      copy_units<std::uint32_t, kFar>(from, to, row_bytes, thread, is_wanted);
    } else {
      copy_units<std::uint8_t, kFar>(from, to, row_bytes, thread, is_wanted);
    }
  }
};

struct Travelling {
  TravellingRows tensors[PeerStep::kMostTensors];
  int count;
};

/// `arena`: where they begin in an arena.
TravellingRows rows_of(const TensorView& tensor, std::int64_t arena) {
  TravellingRows rows{};
  rows.here = const_cast<char*>(tensor.as<const char>());
  rows.pitch = bytes(tensor.dtype(), tensor.stride(0));
  rows.arena = arena;
  rows.row_bytes = static_cast<std::int32_t>(bytes(tensor.dtype(), tensor.size(1)));
  const auto all = reinterpret_cast<std::uintptr_t>(rows.here) |
                   static_cast<std::uintptr_t>(rows.pitch | rows.arena | rows.row_bytes);
  rows.unit = all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
  return rows;
}

Travelling travelling(const PeerStep& step, std::span<const TensorView> tensors) {
  Travelling result{};
  for (const TensorView& tensor : tensors) {
    const int t = result.count++;
    result.tensors[t] = rows_of(tensor, step.rows[t]);
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
  bool follows_route;  // as in publish_rows()
};

/// Number i of the ids and weights of a token, in the arena of rank i / topk. Behind the tokens
/// that there are, ids are -1.
struct Choice {
  std::int32_t id = -1;  // of a logical expert
  float weight = 0;

  Choice() = default;
  __device__ Choice(const PublishParams& p, int token, int i) {
    if (token >= p.num_tokens) return;
    const std::int64_t slot = std::int64_t{token} * p.step.topk + i % p.step.topk;
    id = p.ids[slot];
    weight = p.weights[slot];
  }
  __device__ void publish(const PublishParams& p, int token, int i) const {
    const StepParams& s = p.step;
    const Peers& peers = s.context.peers;
    const std::int64_t row = std::int64_t{peers.rank} * s.most_tokens + token;
    const std::int64_t slot = row * s.topk + i % s.topk;
    const std::int32_t physical = p.replicas.choose(id, token);
    in_arena<std::int32_t>(peers, i / s.topk, s.ids)[slot] = physical;
    in_arena<float>(peers, i / s.topk, s.weights)[slot] = weight;
    if (i < s.topk) {
      in_arena<std::int32_t>(peers, peers.rank, s.own_ids)[token * s.topk + i] = physical;
    }
  }
};

/// Copies the rows to this rank's arena, ids and weights to all. May begin while the router still
/// chooses these.
__global__ void __launch_bounds__(kMostThreads)
    publish_kernel(const __grid_constant__ PublishParams p) {
  const StepParams& s = p.step;
  const Peers& peers = s.context.peers;
  let_next_launch_begin();
  const std::uint32_t is_dead = DeviceWords::load(&peers.own().dead);
  const std::uint32_t before = number_before(s, Round::kDispatch);
  const RowTeam team;
  const int choices = peers.size * s.topk;
  for (int token = team.first; token < s.most_tokens; token += team.step) {
    Choice first;
    const auto choose = [&] { first = Choice(p, token, team.thread % choices); };
    if (!p.follows_route) choose();  // on its way while the row is copied
    for (int t = 0; token < p.num_tokens && t < p.rows.count; ++t) {
      const TravellingRows& rows = p.rows.tensors[t];
      const char* const from = rows.here + token * rows.pitch;
      char* const to =
          in_arena<char>(peers, peers.rank, rows.arena) + std::int64_t{token} * rows.row_bytes;
      // Those that were quantized there stay.
      if (from != to) rows.copy<false>(from, to, team.thread, [&] { return is_dead == 0; });
    }
    if (is_dead != 0) break;
    if (p.follows_route) {
      wait_for_previous_launch();
      choose();
    }
    if (team.thread < choices) first.publish(p, token, team.thread);
    for (int i = team.thread + RowTeam::kThreads; i < choices; i += RowTeam::kThreads) {
      Choice(p, token, i).publish(p, token, i);
    }
  }
  wait_for_previous_launch();
  if (is_dead != 0) return;
  signal_when_all_done(s, Round::kDispatch, s.key(), before);
}

struct PullParams {
  StepParams step;
  Travelling rows;
  core::LocalExperts local_experts;
  std::int32_t* slot_rows;
  float* ones;
  SlotCount count;
  bool reads_ahead;  // rows, beside the ids that say which are wanted
};

/// Where few rows are not wanted, so that these cost less than waiting for the ids first.
bool reads_ahead(const PeerStep& step, int ranks) {
  constexpr double kMostBytes = 64 << 10;  // NVLink brings them in 0.2 us
  if (step.topk > 32) return false;        // more than the lanes of a warp
  const double unwanted = std::pow(1 - 1.0 / ranks, static_cast<double>(step.topk));
  return unwanted * static_cast<double>((ranks - 1) * step.most_tokens * step.row_bytes) <=
         kMostBytes;
}

/// Ahead of the rows, as the host waits for it; the last block tells it.
__device__ void count_slots(const PullParams& p) {
  const StepParams& s = p.step;
  const Peers& peers = s.context.peers;
  ArenaHead& own = peers.own();
  const auto* ids = in_arena<const std::int32_t>(peers, peers.rank, s.ids);
  const int slots = peers.size * s.most_tokens * s.topk;
  int found = 0;
  for (int slot = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); slot < slots;
       slot += static_cast<int>(gridDim.x * blockDim.x)) {
    found += p.local_experts(ids[slot]) >= 0 ? 1 : 0;
  }
  found = __reduce_add_sync(~0U, found);
  if (threadIdx.x % 32 == 0) atomicAdd(&own.slots, static_cast<std::uint32_t>(found));
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&own.counted, 1) != gridDim.x - 1) return;
  __threadfence();
  own.counted = 0;
  const std::uint64_t all = atomicExch(&own.slots, 0);
  DeviceWords::store_release(p.count.word, std::uint64_t{p.count.number} << 32 | all);
}

struct LeaveParams {
  TravellingRows rows;
  const std::int32_t* ids;
  std::int32_t k;
  core::LocalExperts local_experts;
  RowTargets targets;
  std::int32_t num_targets;
};
/// A block for each row. Neighbours take rows for different ranks.
__global__ void __launch_bounds__(RowTeam::kThreads)
    leave_kernel(const __grid_constant__ LeaveParams p) {
  const std::int64_t target = blockIdx.x % p.num_targets, place = blockIdx.x / p.num_targets;
  const std::int64_t row = target * p.targets.rows_each + place;
  bool is_local = false;
  for (int j = 0; j < p.k; ++j) is_local |= p.local_experts(p.ids[row * p.k + j]) >= 0;
  if (!is_local || DeviceWords::load(p.targets.failed) != 0) return;
  p.rows.copy<false>(p.rows.here + row * p.rows.pitch,
                     reinterpret_cast<char*>(p.targets.rows[target]) + place * p.rows.row_bytes,
                     static_cast<int>(threadIdx.x), [] { return true; });
}

/// By each warp of a team: whether a row names an expert of this rank.
__device__ bool finds_expert(const PullParams& p, const std::int32_t* ids, std::int64_t row,
                             int thread) {
  const StepParams& s = p.step;
  const int lane = thread % 32;
  bool found = false;
  for (int first = 0; first < s.topk; first += 32) {
    const int j = first + lane;
    const std::int64_t slot = row * s.topk + j;
    const bool is_here = j < s.topk && p.local_experts(ids[slot]) >= 0;
    found |= __any_sync(~0U, is_here) != 0;
    if (thread >= 32 || j >= s.topk) continue;
    if (p.slot_rows) p.slot_rows[slot] = is_here ? static_cast<std::int32_t>(slot) : -1;
    if (p.ones) p.ones[slot] = 1;
  }
  return found;
}

/// Neighbouring teams take rows of different ranks, beginning behind this one, so that no rank is
/// read by all at once.
__device__ void fetch_rows(const PullParams& p) {
  const StepParams& s = p.step;
  const Peers& peers = s.context.peers;
  const auto* ids = in_arena<const std::int32_t>(peers, peers.rank, s.ids);
  const int all = peers.size * s.most_tokens;
  const RowTeam team;
  const int lane = team.thread % 32;
  for (int i = team.first; i < all; i += team.step) {
    const int source = (i + 1 + peers.rank) % peers.size, token = i / peers.size;
    const std::int64_t row = std::int64_t{source} * s.most_tokens + token;
    std::int32_t id = -1;
    if (p.reads_ahead) {
      if (lane < s.topk) id = ids[row * s.topk + lane];
    } else if (!finds_expert(p, ids, row, team.thread)) {
      continue;
    }
    const auto is_wanted = [&] {
      return !p.reads_ahead || __any_sync(~0U, p.local_experts(id) >= 0) != 0;
    };
    for (int t = 0; t < p.rows.count; ++t) {
      const TravellingRows& rows = p.rows.tensors[t];
      rows.copy<true>(
          in_arena<const char>(peers, source, rows.arena) + std::int64_t{token} * rows.row_bytes,
          rows.here + row * rows.pitch, team.thread, is_wanted);
    }
  }
}
/// May begin while publish_kernel() of this rank still runs: this rank's own signal, for which it
/// waits too, says when that is done. No earlier kernel reads or writes what this one writes.
__global__ void __launch_bounds__(kMostThreads) pull_kernel(const __grid_constant__ PullParams p) {
  if (await_all(p.step, Round::kDispatch)) {
    if (p.count.word) count_slots(p);
    if (p.rows.count > 0) fetch_rows(p);  // else the experts bring them
  }
  wait_for_previous_launch();
  if (blockIdx.x == 0 && threadIdx.x == 0) begin_return<DeviceWords>(p.step.context.peers);
}

/// Behind the experts. Begins when they end, and so a little earlier than without overlap.
__global__ void tell_results_kernel(const __grid_constant__ StepParams p) {
  wait_for_previous_launch();
  let_next_launch_begin();
  tell_return<DeviceWords>(p.context.peers, p.key(), static_cast<int>(threadIdx.x));
}

__global__ void read_marks_kernel(const MappedBlocks blocks) {
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= blocks.size) return;
  blocks.heads[blocks.rank]->found[rank] = DeviceWords::load_acquire(&blocks.heads[rank]->mark);
}

/// Uses what was read, which the compiler would leave out else: writes it if it is a number that
/// hardly ever comes.
__device__ void consume(std::uint32_t read, std::uint32_t* sink) {
  constexpr std::uint32_t kRare = 0x9e3779b9;
  if (read == kRare) *sink = read;
}

__global__ void __launch_bounds__(kMostThreads)
    read_arena_kernel(const uint4* arena, int parts_of_arena, int parts, std::uint32_t* sink) {
  constexpr int kUnits = kReadBytes / sizeof(uint4), kBatch = kUnits / kMostThreads;
  std::uint32_t read = 0;
  for (int part = static_cast<int>(blockIdx.x); part < parts; part += static_cast<int>(gridDim.x)) {
    const uint4* from = arena + std::int64_t{kUnits} * (part % parts_of_arena) + threadIdx.x;
    uint4 values[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) values[b] = load_far(from + b * kMostThreads);
#pragma unroll
    for (const uint4& value : values) read += value.x + value.y + value.z + value.w;
  }
  consume(read, sink);
}

__global__ void read_words_kernel(const std::uint64_t* word, int times, std::uint32_t* sink) {
  std::uint64_t read = 0;
  for (int i = 0; i < times; ++i) read += DeviceWords::load_acquire(word);
  consume(static_cast<std::uint32_t>(read), sink);
}

}  // namespace

void publish_rows(const PeerContext& context, const PeerStep& step, const PublishedRows& rows,
                  bool follows_route, Stream stream) {
  PublishParams p{};
  p.step = step_params(context, step);
  p.rows = travelling(step, rows.tensors);
  p.ids = rows.ids.as<const std::int32_t>();
  p.weights = rows.weights.as<const float>();
  p.replicas = rows.replicas;
  p.num_tokens = static_cast<std::int32_t>(rows.ids.size(0));
  p.follows_route = follows_route;
  launch_teams<RowTeam>(publish_kernel, step.most_tokens, stream, follows_route, p);
}

void pull_rows(const PeerContext& context, const PeerStep& step, const PulledRows& rows,
               const SlotCount& count, bool overlap_previous, Stream stream) {
  PullParams p{};
  p.step = step_params(context, step);
  p.rows = travelling(step, rows.tensors);
  p.local_experts = core::LocalExperts(rows.expert_map, rows.num_local_experts);
  p.slot_rows = rows.slot_rows.as<std::int32_t>();
  p.ones = rows.ones.as<float>();
  p.count = count;
  p.reads_ahead = !p.slot_rows && reads_ahead(step, context.peers.size);
  constexpr std::int64_t kCountedSlots = 4096;  // of a block that fetches no rows
  const std::int64_t rows_of_all = context.peers.size * step.most_tokens;
  std::int64_t pieces = rows_of_all;
  if (p.rows.count == 0) {
    pieces = count.word ? core::ceil_div(rows_of_all * step.topk, kCountedSlots) : 1;
  }
  launch_teams<RowTeam>(pull_kernel, pieces, stream, overlap_previous, p);
}

void leave_rows(const LeftRows& rows, const RowTargets& targets, Stream stream) {
  const std::int64_t num_rows = rows.rows.size(0);
  if (num_rows == 0) return;
  LeaveParams p{};
  p.rows = rows_of(rows.rows, 0);
  p.k = static_cast<std::int32_t>(rows.ids.size(1));
  p.ids = rows.ids.as<const std::int32_t>();
  p.local_experts = core::LocalExperts(rows.expert_map, rows.num_local_experts);
  p.targets = targets;
  p.num_targets = static_cast<std::int32_t>(num_rows / targets.rows_each);
  launch(leave_kernel, dim3(static_cast<unsigned>(num_rows)), dim3(RowTeam::kThreads), 0, stream,
         false, p);
}

void tell_results(const PeerContext& context, const PeerStep& step, Stream stream) {
  launch(tell_results_kernel, dim3(1), dim3(32), 0, stream, true, step_params(context, step));
}

void read_marks(const MappedBlocks& blocks, Stream stream) {
  launch(read_marks_kernel, dim3(1), dim3(32), 0, stream, false, blocks);
}

void read_arena(const ArenaHead& arena, std::size_t arena_bytes, std::size_t bytes,
                std::uint32_t* sink, Stream stream) {
  launch(read_arena_kernel, dim3(static_cast<unsigned>(multiprocessor_count(stream.device))),
         dim3(kMostThreads), 0, stream, false, reinterpret_cast<const uint4*>(&arena),
         static_cast<int>(arena_bytes / kReadBytes), static_cast<int>(bytes / kReadBytes), sink);
}

void read_words(const ArenaHead& arena, int times, std::uint32_t* sink, Stream stream) {
  launch(read_words_kernel, dim3(1), dim3(1), 0, stream, false, &arena.mark, times, sink);
}

void load_step_kernels() {
  load_kernel(publish_kernel);
  load_kernel(pull_kernel);
  load_kernel(leave_kernel);
  load_kernel(tell_results_kernel);
  load_kernel(read_arena_kernel);
  load_kernel(read_words_kernel);
  load_sum_kernels();
  load_parts_kernels();
}

}  // namespace fusedmoe::cuda
