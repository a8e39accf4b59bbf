// Router logits, tile by tile: logits (num_tokens, num_experts) = x weight^T + bias, on tensor
// cores.
//
// Products are exact whatever the dtypes (fragments.cuh) and added in fp32. A dot product has one
// order in every kernel and at every num_tokens: hidden is cut into chunks of 32 columns and the
// chunks into 8 slices, a slice is one chain of mma instructions on one accumulator, and the slices
// are added from first to last, then the bias. 8 warps compute the slices of one tile (tokens,
// experts), whose size is free. Operands go from global memory straight to registers, so that one
// token, too, streams the weights with many loads in flight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/cp_async.cuh"
#include "cuda/router/fragments.cuh"
#include "cuda/router/kernels.h"
#include "cuda/router/scores.cuh"

namespace fusedmoe::cuda {

constexpr int kSlices = 8;

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
  static constexpr int kSharedBytes = kSlices * kTokens * kPitch * static_cast<int>(sizeof(float));
};

/// The rows of one block's tile that a lane loads. Rows behind the last are the last one again:
/// their results are not stored.
template <typename X, typename W, typename Shape>
struct LaneRows {
  const X* first_x;                           // of the tile's first token
  unsigned x_offset[2 * Shape::kTokenTiles];  // elements behind it
  const W* weight[Shape::kExpertTiles];

  __device__ LaneRows(const LogitsParams& p, std::int64_t first_token, int first_expert, int lane) {
    const int row = lane / 4, column = lane % 4 * kLaneColumns;
    first_x = static_cast<const X*>(p.x.data) + first_token * p.x_stride;
#pragma unroll
    for (int i = 0; i < 2 * Shape::kTokenTiles; ++i) {
      const std::int64_t token = min(first_token + 8 * i + row, p.num_tokens - 1);
      x_offset[i] = static_cast<unsigned>(token - first_token) * p.x_stride + column;
    }
#pragma unroll
    for (int i = 0; i < Shape::kExpertTiles; ++i) {
      const std::int64_t expert = min(first_expert + kExpertTile * i + row, p.num_experts - 1);
      weight[i] = static_cast<const W*>(p.weight.data) + expert * p.hidden + column;
    }
  }
};

/// Fetches the weights of a slice into the L2 cache. They are older than the forward, so this may
/// happen before the kernels in front have ended; x must wait.
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
using Accumulators =
    float[kLevels<X, W>][Shape::kTokenTiles][Shape::kExpertTiles][kLaneAccumulators];

/// accumulators += one chunk. Pieces and columns in an order that is the same in every tile.
template <typename X, typename W, typename Shape>
__device__ void multiply(const Operands<X, W, Shape>& operands,
                         Accumulators<X, W, Shape>& accumulators) {
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
            mma(accumulators[i + j > 0 ? 1 : 0][t][e], upper.pairs[i][step], lower.pairs[i][step],
                upper.pairs[i][step + 1], lower.pairs[i][step + 1], weight[e].pairs[j][step],
                weight[e].pairs[j][step + 1]);
          }
        }
      }
    }
  }
}

/// accumulators = the chunks [begin, end), of which those from `aligned_end` on cannot be loaded at
/// once.
template <typename X, typename W, typename Shape>
__device__ void multiply_slice(const LaneRows<X, W, Shape>& rows, int begin, int end,
                               int aligned_end, int hidden,
                               Accumulators<X, W, Shape>& accumulators) {
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
      for (int i = 0; i < 2 * Shape::kTokenTiles; ++i)
        operands[b].x[i] = load(rows.first_x + (rows.x_offset[i] + offset));
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (chunk + b < min(end, aligned_end)) multiply<X, W, Shape>(operands[b], accumulators);
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
      operands.x[i] = load_some(rows.first_x + (rows.x_offset[i] + offset), count);
    }
    multiply<X, W, Shape>(operands, accumulators);
  }
}

/// Stores the accumulators of one warp, (tokens, kPitch).
template <typename X, typename W, typename Shape>
__device__ void store_accumulators(const Accumulators<X, W, Shape>& accumulators, float* partial,
                                   int lane) {
#pragma unroll
  for (int t = 0; t < Shape::kTokenTiles; ++t) {
#pragma unroll
    for (int e = 0; e < Shape::kExpertTiles; ++e) {
#pragma unroll
      for (int i = 0; i < kLaneAccumulators; ++i) {
        // Lane 4 g + t holds columns 2 t, 2 t + 1 of row g, then of row g + 8.
        const int row = t * kTokenTile + lane / 4 + i / 2 * 8;
        const int column = e * kExpertTile + lane % 4 * 2 + i % 2;
        float sum = accumulators[0][t][e][i];
        if constexpr (kLevels<X, W> == 2) sum += accumulators[1][t][e][i];
        partial[row * Shape::kPitch + column] = sum;
      }
    }
  }
}

__device__ inline const void* address(const LogitsOperand& operand, int index) {
  const int element_bytes = operand.dtype == DType::kF32 ? 4 : 2;
  return static_cast<const char*>(operand.data) + index * element_bytes;
}

__device__ inline float element(const LogitsOperand& operand, int index) {
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

/// The logit in a row and column of a tile: the slices (kSlices, tokens, kPitch) in shared
/// memory, added in order, and the bias.
template <typename Shape>
__device__ float add_slices(const LogitsParams& p, const float* partial, int row, int column,
                            int expert) {
  const float* sums = partial + row * Shape::kPitch + column;
  float logit = sums[0];
#pragma unroll
  for (int slice = 1; slice < kSlices; ++slice) {
    logit += sums[slice * Shape::kNumTokens * Shape::kPitch];
  }
  if (p.bias.data) logit += element(p.bias, expert);
  return logit;
}

/// How many chunks of both operands can be loaded 16 bytes at a time.
template <typename X, typename W>
int aligned_chunks(const LogitsParams& p) {
  const auto aligned = [](const void* data, std::int64_t row_bytes) {
    return (reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uintptr_t>(row_bytes)) %
               sizeof(uint4) ==
           0;
  };
  return aligned(p.x.data, std::int64_t{p.x_stride} * static_cast<std::int64_t>(sizeof(X))) &&
                 aligned(p.weight.data,
                         std::int64_t{p.hidden} * static_cast<std::int64_t>(sizeof(W)))
             ? p.hidden / kChunk
             : 0;
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

}  // namespace fusedmoe::cuda
