// The router's first half on Hopper: logits (num_tokens, num_experts) = x weight^T + bias.
//
// Tensor cores; products are exact whatever the dtypes (fragments.cuh) and added in fp32. A dot
// product has one order at every num_tokens: hidden is cut into chunks of 32 columns and the chunks
// into 8 parts, a part is one chain of mma instructions on one accumulator, and the parts are added
// from first to last, then the bias. The 8 warps of a block compute the parts of one tile (tokens,
// experts), whose size is free. Operands go from global memory straight to registers, so that one
// token, too, streams the weights with many loads in flight.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/device/launch.h"
#include "cuda/device/prefetch.cuh"
#include "cuda/router/fragments.cuh"
#include "cuda/router/kernels.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kParts = 8;
constexpr int kWarpSize = 32;
constexpr int kThreads = kParts * kWarpSize;

/// A tile of one block, in instructions; and how many chunks a lane loads at once.
template <int kTokens, int kExperts, int kChunks>
struct Tile {
  static constexpr int kTokenTiles = kTokens / kTokenTile;
  static constexpr int kExpertTiles = kExperts / kExpertTile;
  static constexpr int kChunksInFlight = kChunks;
  static constexpr int kNumTokens = kTokens;
  static constexpr int kNumExperts = kExperts;
  // Rows of partial sums that are 8 apart modulo 32 words: no bank is hit twice.
  static constexpr int kPitch = kExperts / 32 * 32 + 8;
  static constexpr int kSharedBytes = kParts * kTokens * kPitch * static_cast<int>(sizeof(float));
};

/// The rows of one block's tile that a lane loads. Rows behind the last are the last one again:
/// their results are not stored.
template <typename X, typename W, typename Shape>
struct LaneRows {
  const X* x[2 * Shape::kTokenTiles];
  const W* weight[Shape::kExpertTiles];

  __device__ LaneRows(const LogitsParams& p, std::int64_t first_token, int first_expert, int lane) {
    const int row = lane / 4, column = lane % 4 * kLaneColumns;
#pragma unroll
    for (int i = 0; i < 2 * Shape::kTokenTiles; ++i) {
      const std::int64_t token = min(first_token + 8 * i + row, p.num_tokens - 1);
      x[i] = static_cast<const X*>(p.x.data) + token * p.hidden + column;
    }
#pragma unroll
    for (int i = 0; i < Shape::kExpertTiles; ++i) {
      const std::int64_t expert = min(first_expert + kExpertTile * i + row, p.num_experts - 1);
      weight[i] = static_cast<const W*>(p.weight.data) + expert * p.hidden + column;
    }
  }
};

/// Fetches the weights of a part into the L2 cache. They are there to be read before the kernels in
/// front have ended, as x is not.
template <typename X, typename W, typename Shape>
__device__ void prefetch_weights(const LaneRows<X, W, Shape>& rows, int begin, int end, int lane) {
  for (int chunk = begin + lane % 4; chunk < end; chunk += 4) {
#pragma unroll
    for (int i = 0; i < Shape::kExpertTiles; ++i) {
      prefetch_l2(rows.weight[i] + chunk * kChunk);
    }
  }
}

/// A chunk of both operands.
template <typename X, typename W, typename Shape>
struct Operands {
  Raw<X> x[2 * Shape::kTokenTiles];
  Raw<W> weight[Shape::kExpertTiles];
};

/// Two levels: products of first pieces, and the small rest of the products, which would lose most
/// of its digits if it were added to the large sum bit by bit.
template <typename X, typename W>
constexpr int kLevels = kPieces<X>* kPieces<W> == 1 ? 1 : 2;

template <typename X, typename W, typename Shape>
using Sums = float[kLevels<X, W>][Shape::kTokenTiles][Shape::kExpertTiles][kAccumulators];

/// sums += one chunk. Pieces and columns in an order that is the same in every tile.
template <typename X, typename W, typename Shape>
__device__ void multiply(const Operands<X, W, Shape>& operands, Sums<X, W, Shape>& sums) {
  Fragment<W> weight[Shape::kExpertTiles];
#pragma unroll
  for (int e = 0; e < Shape::kExpertTiles; ++e) weight[e] = split(operands.weight[e]);
#pragma unroll
  for (int t = 0; t < Shape::kTokenTiles; ++t) {
    const Fragment<X> upper = split(operands.x[2 * t]), lower = split(operands.x[2 * t + 1]);
#pragma unroll
    for (int step = 0; step < 4; step += 2) {
#pragma unroll
      for (int i = 0; i < kPieces<X>; ++i) {
#pragma unroll
        for (int j = 0; j < kPieces<W>; ++j) {
#pragma unroll
          for (int e = 0; e < Shape::kExpertTiles; ++e) {
            mma(sums[i + j > 0 ? 1 : 0][t][e], upper.pairs[i][step], lower.pairs[i][step],
                upper.pairs[i][step + 1], lower.pairs[i][step + 1], weight[e].pairs[j][step],
                weight[e].pairs[j][step + 1]);
          }
        }
      }
    }
  }
}

/// sums = the chunks [begin, end), of which those from `aligned_end` on cannot be loaded at once.
template <typename X, typename W, typename Shape>
__device__ void multiply_part(const LaneRows<X, W, Shape>& rows, int begin, int end,
                              int aligned_end, int hidden, Sums<X, W, Shape>& sums) {
  constexpr int kBatch = Shape::kChunksInFlight;
  int chunk = begin;
  for (; chunk < min(end, aligned_end); chunk += kBatch) {
    Operands<X, W, Shape> operands[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (chunk + b >= min(end, aligned_end)) continue;
      const std::int64_t offset = static_cast<std::int64_t>(chunk + b) * kChunk;
#pragma unroll
      for (int i = 0; i < Shape::kExpertTiles; ++i) {
        operands[b].weight[i] = load(rows.weight[i] + offset);
      }
#pragma unroll
      for (int i = 0; i < 2 * Shape::kTokenTiles; ++i) operands[b].x[i] = load(rows.x[i] + offset);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (chunk + b < min(end, aligned_end)) multiply<X, W, Shape>(operands[b], sums);
    }
  }
  const int lane_column = static_cast<int>(threadIdx.x) % 4 * kLaneColumns;
  for (chunk = max(begin, min(end, aligned_end)); chunk < end; ++chunk) {
    const std::int64_t offset = static_cast<std::int64_t>(chunk) * kChunk;
    const int count = hidden - chunk * kChunk - lane_column;
    Operands<X, W, Shape> operands;
#pragma unroll
    for (int i = 0; i < Shape::kExpertTiles; ++i) {
      operands.weight[i] = load_some(rows.weight[i] + offset, count);
    }
#pragma unroll
    for (int i = 0; i < 2 * Shape::kTokenTiles; ++i) {
      operands.x[i] = load_some(rows.x[i] + offset, count);
    }
    multiply<X, W, Shape>(operands, sums);
  }
}

/// Stores the sums of one warp, (tokens, kPitch).
template <typename X, typename W, typename Shape>
__device__ void store_part(const Sums<X, W, Shape>& sums, float* part, int lane) {
#pragma unroll
  for (int t = 0; t < Shape::kTokenTiles; ++t) {
#pragma unroll
    for (int e = 0; e < Shape::kExpertTiles; ++e) {
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) {
        // Lane 4 g + t holds columns 2 t, 2 t + 1 of row g, then of row g + 8.
        const int row = t * kTokenTile + lane / 4 + i / 2 * 8;
        const int column = e * kExpertTile + lane % 4 * 2 + i % 2;
        float sum = sums[0][t][e][i];
        if constexpr (kLevels<X, W> == 2) sum += sums[1][t][e][i];
        part[row * Shape::kPitch + column] = sum;
      }
    }
  }
}

__device__ const void* address(const LogitsOperand& operand, int index) {
  const int element_bytes = operand.dtype == DType::kF32 ? 4 : 2;
  return static_cast<const char*>(operand.data) + index * element_bytes;
}

__device__ float element(const LogitsOperand& operand, int index) {
  const void* from = address(operand, index);
  switch (operand.dtype) {
    case DType::kBF16:
      return static_cast<float>(*static_cast<const __nv_bfloat16*>(from));
    case DType::kF16:
      return static_cast<float>(*static_cast<const __half*>(from));
    default:
      return *static_cast<const float*>(from);
  }
}

/// Adds up the parts (kParts, tokens, kPitch) in shared memory, and the bias.
template <typename Shape>
__device__ void store_logits(const LogitsParams& p, const float* partial, std::int64_t first_token,
                             int first_expert) {
  constexpr int kPartSize = Shape::kNumTokens * Shape::kPitch;
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kNumTokens * Shape::kNumExperts;
       i += kThreads) {
    const int row = i / Shape::kNumExperts, column = i % Shape::kNumExperts;
    const std::int64_t token = first_token + row;
    const int expert = first_expert + column;
    if (token >= p.num_tokens || expert >= p.num_experts) continue;
    const float* sums = partial + row * Shape::kPitch + column;
    float logit = sums[0];
#pragma unroll
    for (int part = 1; part < kParts; ++part) logit += sums[part * kPartSize];
    if (p.bias.data) logit += element(p.bias, expert);
    p.logits[token * p.num_experts + expert] = logit;
  }
}

/// Grid: the tiles, experts first. Warp w computes part w.
template <typename X, typename W, typename Shape>
__global__ void __launch_bounds__(kThreads)
    router_logits_kernel(const LogitsParams p, int expert_blocks, int aligned_chunks) {
  extern __shared__ float partial[];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int first_expert = static_cast<int>(blockIdx.x) % expert_blocks * Shape::kNumExperts;
  const std::int64_t first_token =
      static_cast<std::int64_t>(static_cast<int>(blockIdx.x) / expert_blocks) * Shape::kNumTokens;
  const int num_chunks = (p.hidden + kChunk - 1) / kChunk;
  const int part_chunks = (num_chunks + kParts - 1) / kParts;
  const int begin = min(warp * part_chunks, num_chunks);
  const int end = min(begin + part_chunks, num_chunks);
  const LaneRows<X, W, Shape> rows(p, first_token, first_expert, lane);

  cudaTriggerProgrammaticLaunchCompletion();
  if constexpr (Shape::kTokenTiles == 1) {
    prefetch_weights(rows, begin, min(end, p.hidden / kChunk), lane);
    if (threadIdx.x == 0 && p.bias.data) prefetch_l2(address(p.bias, first_expert));
  }
  cudaGridDependencySynchronize();
  Sums<X, W, Shape> sums = {};
  multiply_part<X, W, Shape>(rows, begin, end, aligned_chunks, p.hidden, sums);

  store_part<X, W, Shape>(sums, partial + warp * Shape::kNumTokens * Shape::kPitch, lane);
  __syncthreads();
  store_logits<Shape>(p, partial, first_token, first_expert);
}

// ---------------------------------------------------------------------------------------------

std::int64_t num_blocks(const LogitsParams& p, std::int64_t tokens, std::int64_t experts) {
  return (p.num_tokens + tokens - 1) / tokens * ((p.num_experts + experts - 1) / experts);
}

/// How many chunks of both operands can be loaded 16 bytes at a time.
template <typename X, typename W>
int aligned_chunks(const LogitsParams& p) {
  const auto aligned = [&](const void* data, std::size_t element_bytes) {
    return reinterpret_cast<std::uintptr_t>(data) % sizeof(uint4) == 0 &&
           p.hidden * element_bytes % sizeof(uint4) == 0;
  };
  return aligned(p.x.data, sizeof(X)) && aligned(p.weight.data, sizeof(W)) ? p.hidden / kChunk : 0;
}

template <typename X, typename W, typename Shape>
void launch_tiles(const LogitsParams& p, Stream stream) {
  const std::int64_t blocks = num_blocks(p, Shape::kNumTokens, Shape::kNumExperts);
  const int expert_blocks = (p.num_experts + Shape::kNumExperts - 1) / Shape::kNumExperts;
  launch(router_logits_kernel<X, W, Shape>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
         Shape::kSharedBytes, static_cast<cudaStream_t>(stream.handle), false, p, expert_blocks,
         aligned_chunks<X, W>(p));
}

/// Larger tiles read less and so are chosen as soon as they fill the multiprocessors; a middle one
/// earlier, because many small ones are bound by the L2 cache.
template <typename X, typename W>
void launch_pair(const LogitsParams& p, Stream stream) {
  if constexpr (kPieces<X> * kPieces<W> == 1) {
    if (p.num_experts > 32 && num_blocks(p, 64, 64) >= 96) {
      launch_tiles<X, W, Tile<64, 64, 1>>(p, stream);
      return;
    }
  }
  if (num_blocks(p, 32, 32) >= 32) {
    launch_tiles<X, W, Tile<32, 32, kPieces<X> * kPieces<W> == 1 ? 2 : 1>>(p, stream);
  } else {
    launch_tiles<X, W, Tile<16, 8, kPieces<X> * kPieces<W> == 1 ? 6 : 2>>(p, stream);
  }
}

/// Calls function(T{}) with the element type of the dtype.
template <typename Function>
void with_element(DType dtype, Function function) {
  if (dtype == DType::kBF16) {
    function(__nv_bfloat16{});
  } else if (dtype == DType::kF16) {
    function(__half{});
  } else {
    function(float{});
  }
}

}  // namespace

void launch_router_logits(const LogitsParams& params, Stream stream) {
  with_element(params.x.dtype, [&](auto x) {
    with_element(params.weight.dtype,
                 [&](auto weight) { launch_pair<decltype(x), decltype(weight)>(params, stream); });
  });
}

}  // namespace fusedmoe::cuda
