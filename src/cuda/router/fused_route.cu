// Routing of few tokens in one launch.
//
// Where the router's weights are given, one cluster of thread blocks computes the logits. Its
// blocks share the tiles, and each writes its logits to the shared memory of all of them. After one
// barrier of the cluster every block has all logits. Where the logits are given, every block reads
// them all.
//
// From there on each block repeats the same work, which is faster for so few tokens than dividing
// it: a warp for each token chooses its experts, then the block sorts the slots by expert. The
// first block alone writes the results. The permuted rows are divided among the blocks.
//
// The kernel needs no cleared memory. Outside of the cluster, no block waits for another.
#include <algorithm>

#include "cuda/device/cluster.cuh"
#include "cuda/device/launch.h"
#include "cuda/device/overlap.cuh"
#include "cuda/router/fused_route.h"
#include "cuda/router/logits_tile.cuh"
#include "cuda/router/route_token.cuh"
#include "cuda/rows/routing_data.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kTilesAtOnce = kWarps / kSlices;  // of logits, in a block
constexpr int kClusterBlocks = 8;               // the most that every device can run as a cluster
constexpr std::int64_t kMaxTokens = 32, kMaxSlots = 512;
constexpr std::int64_t kMaxSharedBytes = 128 << 10;

/// Of router weights and of permuted rows that one cluster takes: more blocks read and write more
/// in the same time, which then is worth a second launch.
constexpr std::int64_t kClusterWeightBytes = 1536 << 10, kClusterRowBytes = 1 << 20;

/// One token tile, as all tokens are.
template <typename X, typename W>
using LogitsTile = Tile<kTokenTile, kExpertTile, kPieces<X> * kPieces<W> == 1 ? 6 : 2>;
constexpr int kPartialWords =
    kTilesAtOnce * LogitsTile<float, float>::kSharedBytes / static_cast<int>(sizeof(float));

struct FusedParams {
  LogitsParams logits;
  RouteParams route;
  RoutingDataParams data;
  int scratch_words;
};

/// Shared memory of a block.
struct FusedMemory {
  float* logits;          // (num_tokens, num_experts)
  float* weights;         // (slots)
  std::int32_t* ids;      // (slots)
  std::int32_t* experts;  // (slots): local ones
  std::int32_t* load;     // (num_experts)
  int* scratch;           // partial sums of logits, then keys, then the sort's counters

  static std::int64_t words(const FusedParams& p) {
    return p.route.num_tokens * p.route.num_experts + 3 * p.data.slots + p.route.num_experts +
           p.scratch_words;
  }
  __device__ FusedMemory(const FusedParams& p, float* memory)
      : logits(memory),
        weights(logits + p.route.num_tokens * p.route.num_experts),
        ids(reinterpret_cast<std::int32_t*>(weights + p.data.slots)),
        experts(ids + p.data.slots),
        load(experts + p.data.slots),
        scratch(load + p.route.num_experts) {}
};

/// From logits in shared memory to everything else, by block `rank` of num_ranks.
__device__ void route_and_permute(const FusedParams& p, const FusedMemory& memory, int rank,
                                  int num_ranks) {
  const RouteParams& route = p.route;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarpSize;
  std::int32_t* load = route.counts && rank == 0 ? memory.load : nullptr;
  if (load) {
    for (int e = thread; e < route.num_experts; e += kThreads) load[e] = 0;
    __syncthreads();
  }
  auto* keys = reinterpret_cast<std::uint32_t*>(memory.scratch) +
               warp * (route.num_experts + route.num_groups);
  for (int token = warp; token < route.num_tokens; token += kWarps) {
    route_token(route, memory.logits + token * route.num_experts, memory.ids + token * route.topk,
                memory.weights + token * route.topk, keys, load);
    __syncwarp();
  }
  __syncthreads();
  for (int slot = thread; slot < p.data.slots; slot += kThreads) {
    const std::int32_t id = memory.ids[slot];
    memory.experts[slot] = p.data.local_experts(id);
    if (rank > 0) continue;
    route.ids[slot] = id;
    route.weights[slot] = memory.weights[slot];
  }
  if (load) {
    for (int e = thread; e < route.num_experts; e += kThreads) route.counts[e] += load[e];
  }
  __syncthreads();
  sort_few_slots<RowKind::kCopy>(p.data, memory.scratch, rank, num_ranks,
                                 [&](std::int64_t slot) { return memory.experts[slot]; });
}

/// One cluster, launched without overlap: everything before has completed.
template <typename X, typename W>
__global__ void FUSEDMOE_CLUSTER(kClusterBlocks) __launch_bounds__(kThreads, 1)
    logits_and_route_kernel(const __grid_constant__ FusedParams p, int aligned_chunks) {
  using Shape = LogitsTile<X, W>;
  extern __shared__ float shared[];
  const FusedMemory memory(p, shared);
  const int rank = cluster_rank(), thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int group = warp / kSlices, slice = warp % kSlices;
  const int num_chunks = (p.logits.hidden + kChunk - 1) / kChunk;
  const int slice_chunks = (num_chunks + kSlices - 1) / kSlices;
  const int begin = min(slice * slice_chunks, num_chunks);
  const int end = min(begin + slice_chunks, num_chunks);
  const int num_tiles = (p.logits.num_experts + kExpertTile - 1) / kExpertTile;
  cluster_arrive();  // runs: the others may write to its shared memory
  let_next_launch_begin();
  constexpr int kStep = kTilesAtOnce * kClusterBlocks;
  for (int tile = group * kClusterBlocks + rank; tile < num_tiles; tile += kStep) {
    const LaneRows<X, W, Shape> rows(p.logits, 0, tile * kExpertTile, lane);
    prefetch_weights(rows, begin, min(end, p.logits.hidden / kChunk), lane);
  }
  zero_words(p.data, rank, kClusterBlocks);

  auto* partial = reinterpret_cast<float*>(memory.scratch);
  const float* of_group = partial + group * kSlices * Shape::kNumTokens * Shape::kPitch;
  for (int first = 0; first < num_tiles; first += kStep) {
    const int first_expert = (first + group * kClusterBlocks + rank) * kExpertTile;
    if (first_expert < p.logits.num_experts) {
      const LaneRows<X, W, Shape> rows(p.logits, 0, first_expert, lane);
      Accumulators<X, W, Shape> accumulators = {};
      multiply_slice<X, W, Shape>(rows, begin, end, aligned_chunks, p.logits.hidden, accumulators);
      store_accumulators<X, W, Shape>(accumulators,
                                      partial + warp * Shape::kNumTokens * Shape::kPitch, lane);
    }
    __syncthreads();
    if (first == 0) cluster_wait();  // all blocks run
    const int value = thread % (kSlices * kWarpSize);
    const int token = value / kExpertTile, expert = first_expert + value % kExpertTile;
    if (token < p.logits.num_tokens && expert < p.logits.num_experts) {
      const float logit = add_slices<Shape>(p.logits, of_group, token, value % kExpertTile, expert);
      const int index = token * p.logits.num_experts + expert;
      p.logits.logits[index] = logit;
      for (int r = 0; r < kClusterBlocks; ++r) in_block(memory.logits, r)[index] = logit;
    }
    __syncthreads();
  }
  cluster_arrive();
  cluster_wait();  // all logits are here, and nobody writes to another block from now on
  route_and_permute(p, memory, rank, kClusterBlocks);
}

/// Launched with overlap behind the kernel of the logits, else without.
template <typename Logit>
__global__ void __launch_bounds__(kThreads)
    route_given_kernel(const __grid_constant__ FusedParams p) {
  extern __shared__ float shared[];
  const FusedMemory memory(p, shared);
  const int rank = static_cast<int>(blockIdx.x), num_ranks = static_cast<int>(gridDim.x);
  let_next_launch_begin();
  wait_for_previous_launch();
  zero_words(p.data, rank, num_ranks);
  const auto* logits = static_cast<const Logit*>(p.route.logits.data);
  const int count = static_cast<int>(p.route.num_tokens) * p.route.num_experts;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    memory.logits[i] = to_f32(logits[i]);
  }
  __syncthreads();
  route_and_permute(p, memory, rank, num_ranks);
}

// ---------------------------------------------------------------------------------------------

/// Words of FusedMemory::scratch.
std::int64_t scratch_words(std::int64_t num_tokens, std::int64_t num_experts,
                           std::int64_t num_groups, const RoutingDataParams& data) {
  const std::int64_t keys = std::min<std::int64_t>(num_tokens, kWarps) * (num_experts + num_groups);
  const std::int64_t sort = few_slots_words(data.slots, data.num_experts, data.warps);
  return std::max({keys, sort, std::int64_t{kPartialWords}});
}

RoutingDataParams sizes_of(std::int64_t num_tokens, std::int64_t topk,
                           std::int64_t num_local_experts) {
  RoutingDataParams data{};
  data.slots = num_tokens * topk;
  data.topk = static_cast<int>(topk);
  data.num_experts = static_cast<int>(num_local_experts);
  data.warps = sorting_warps(data.slots, num_local_experts, kThreads);
  return data;
}

bool fits_cluster(const FusedParams& p, std::int64_t row_bytes) {
  const std::int64_t weight_bytes = std::int64_t{p.logits.num_experts} * p.logits.hidden *
                                    (p.logits.weight.dtype == DType::kF32 ? 4 : 2);
  return p.logits.num_tokens <= kTokenTile && p.logits.x.dtype != DType::kF32 &&
         (p.logits.weight.dtype == p.logits.x.dtype || p.logits.weight.dtype == DType::kF32) &&
         weight_bytes <= kClusterWeightBytes && p.data.slots * row_bytes <= kClusterRowBytes;
}

void launch_cluster(const FusedParams& p, const Stream& stream) {
  const auto shared_bytes = sizeof(float) * static_cast<std::size_t>(FusedMemory::words(p));
  const auto launch_pair = [&](auto x, auto weight) {
    using X = decltype(x);
    using W = decltype(weight);
    launch(logits_and_route_kernel<X, W>, dim3(kClusterBlocks), dim3(kThreads), shared_bytes,
           stream, false, p, aligned_chunks<X, W>(p.logits));
  };
  const auto launch_x = [&](auto x) {
    if (p.logits.weight.dtype == DType::kF32) {
      launch_pair(x, float{});
    } else {
      launch_pair(x, x);
    }
  };
  if (p.logits.x.dtype == DType::kBF16) {
    launch_x(__nv_bfloat16{});
  } else {
    launch_x(__half{});
  }
}

void launch_given(const FusedParams& p, std::int64_t row_bytes, bool overlap,
                  const Stream& stream) {
  constexpr std::int64_t kBlockBytes = 4 << 10;  // of rows
  const std::int64_t blocks = std::clamp<std::int64_t>(p.data.slots * row_bytes / kBlockBytes, 1,
                                                       multiprocessor_count(stream.device));
  dispatch_storage(p.route.logits.dtype, [&](auto logit) {
    launch(route_given_kernel<decltype(logit)>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
           sizeof(float) * static_cast<std::size_t>(FusedMemory::words(p)), stream, overlap, p);
  });
}

}  // namespace

bool may_fuse(const RouterConfig& config, std::int64_t num_tokens, std::int64_t num_local_experts,
              const DeviceLimits& device) {
  const bool routes_in_two = config.custom || config.scoring == ScoringFunc::kSparsemixer;
  if (routes_in_two || num_tokens < 1 || num_tokens > kMaxTokens ||
      num_tokens * config.topk > kMaxSlots || config.num_experts > kMaxRouterExperts ||
      config.topk > kMaxRouterTopk || num_local_experts > kMaxRouterExperts) {
    return false;
  }
  FusedParams p{};
  p.route.num_tokens = num_tokens;
  p.route.num_experts = static_cast<int>(config.num_experts);
  p.data = sizes_of(num_tokens, config.topk, num_local_experts);
  p.scratch_words = static_cast<int>(
      scratch_words(num_tokens, config.num_experts, config.num_expert_group, p.data));
  return 4 * FusedMemory::words(p) <= std::min(kMaxSharedBytes, device.block_shared_bytes);
}

RoutingData fused_route(const FusedRoute& args, const Stream& stream) {
  FusedParams p{};
  p.route = check_route(*args.config, args.logits, args.correction_bias, args.out, args.expert_load,
                        stream);
  if (!may_fuse(*args.config, p.route.num_tokens, args.num_local_experts,
                limits_of(stream.device))) {
    throw Error("num_tokens", std::to_string(p.route.num_tokens), "few enough for may_fuse()");
  }
  const RoutingData data =
      routing_data_views(args.out.topk_ids, args.num_local_experts, args.routing_data);
  p.data = sizes_of(p.route.num_tokens, p.route.topk, args.num_local_experts);
  p.data.local_experts = core::LocalExperts(args.expert_map, args.num_local_experts);
  p.data.expert_num_tokens = data.expert_num_tokens.as<std::int32_t>();
  p.data.expert_offsets = data.expert_offsets.as<std::int32_t>();
  p.data.permuted_to_slot = data.permuted_to_slot.as<std::int32_t>();
  p.data.slot_to_row = data.slot_to_permuted.as<std::int32_t>();
  p.data.zeroed = args.extras.zeroed;
  p.data.num_zeroed = args.extras.num_zeroed;
  if (args.extras.rows.kind == RowTransform::Kind::kCopy) p.data.rows = args.extras.rows;
  const std::int64_t row_bytes = p.data.rows.to ? p.data.rows.row_bytes : 0;
  p.scratch_words = static_cast<int>(
      scratch_words(p.route.num_tokens, p.route.num_experts, p.route.num_groups, p.data));
  if (!args.weight) {
    launch_given(p, row_bytes, false, stream);
    return data;
  }
  p.logits = check_router_logits(args.weight, args.bias, args.hidden_states, args.logits, stream);
  if (fits_cluster(p, row_bytes) &&
      may_cluster(logits_and_route_kernel<__half, __half>, stream.device)) {
    launch_cluster(p, stream);
  } else {
    launch_router_logits(p.logits, stream);
    launch_given(p, row_bytes, true, stream);
  }
  return data;
}

}  // namespace fusedmoe::cuda
