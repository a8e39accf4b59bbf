// The router's first half on Hopper: logits (num_tokens, num_experts) = x weight^T + bias.
//
// Tensor cores multiply bf16 exactly and add in fp32. An f16 or f32 number is first split into the
// two or three bf16 numbers that add up to it, so every product is exact whatever the dtypes.
// (Infinities are not split: outside bf16 they give NaN.)
//
// A dot product has one order at every num_tokens: hidden is cut into chunks of 32 columns and the
// chunks into 8 parts, a part is one chain of mma instructions on one accumulator, and the parts
// are added from first to last, then the bias. The 8 warps of a block compute the parts of one
// tile (tokens, experts), so one token also streams the weights with many loads in flight; the size
// of the tile is free.
//
// Fragments come straight from global memory: a dot product may take the columns of a chunk in any
// order that is the same for both operands, so lane t of a quad takes columns 8 t ... 8 t + 7 as
// one 16-byte load, the first half for one mma, the second for the next.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/device/launch.h"
#include "cuda/router/kernels.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kParts = 8;
constexpr int kWarpSize = 32;
constexpr int kThreads = kParts * kWarpSize;
constexpr int kChunk = 32;        // columns
constexpr int kLaneColumns = 8;   // of a chunk
constexpr int kTokenTile = 16;    // rows of one mma
constexpr int kExpertTile = 8;    // columns of one mma
constexpr int kAccumulators = 4;  // of one mma and lane

/// How many bf16 numbers one element is: significant bits / 8, rounded up.
template <typename T>
constexpr int kPieces = std::is_same_v<T, float>    ? 3
                        : std::is_same_v<T, __half> ? 2
                                                    : 1;

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

/// A lane's columns of one chunk of one row, as loaded.
template <typename T>
struct Raw {
  uint4 words[kLaneColumns * sizeof(T) / sizeof(uint4)];
};

/// The same as pairs of bf16, per piece.
template <typename T>
struct Fragment {
  std::uint32_t pairs[kPieces<T>][kLaneColumns / 2];
};

template <typename T>
__device__ Raw<T> load(const T* from) {
  Raw<T> raw;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(raw) / sizeof(uint4)); ++i) {
    raw.words[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  return raw;
}

/// The same for `count` elements, possibly none, of any alignment; zeros behind them.
template <typename T>
__device__ Raw<T> load_some(const T* from, int count) {
  union {
    Raw<T> raw;
    T elements[kLaneColumns];
  };
  raw = {};
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    if (i < count) elements[i] = from[i];
  }
  return raw;
}

template <typename T>
__device__ Fragment<T> split(const Raw<T>& raw) {
  Fragment<T> fragment;
  if constexpr (kPieces<T> == 1) {
    fragment.pairs[0][0] = raw.words[0].x;
    fragment.pairs[0][1] = raw.words[0].y;
    fragment.pairs[0][2] = raw.words[0].z;
    fragment.pairs[0][3] = raw.words[0].w;
  } else {
    float rest[kLaneColumns];
    const T* elements = reinterpret_cast<const T*>(raw.words);
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) rest[i] = static_cast<float>(elements[i]);
#pragma unroll
    for (int piece = 0; piece < kPieces<T>; ++piece) {
#pragma unroll
      for (int pair = 0; pair < kLaneColumns / 2; ++pair) {
        // The upper half of an fp32 number is the bf16 number towards 0; what is left is exact.
        const std::uint32_t low = __float_as_uint(rest[2 * pair]);
        const std::uint32_t high = __float_as_uint(rest[2 * pair + 1]);
        fragment.pairs[piece][pair] = __byte_perm(low, high, 0x7632);
        rest[2 * pair] -= __uint_as_float(low & 0xffff0000u);
        rest[2 * pair + 1] -= __uint_as_float(high & 0xffff0000u);
      }
    }
  }
  return fragment;
}

/// sums (16, 8) += a (16, 16) b (16, 8). Lane 4 g + t has columns (or rows of b) 2 t, 2 t + 1 in
/// a0, a1, b0 and those plus 8 in a2, a3, b1; of row g in a0, a2 and of row g + 8 in a1, a3.
__device__ void mma(float (&sums)[kAccumulators], std::uint32_t a0, std::uint32_t a1,
                    std::uint32_t a2, std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

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

/// A chunk of both operands.
template <typename X, typename W, typename Shape>
struct Operands {
  Raw<X> x[2 * Shape::kTokenTiles];
  Raw<W> weight[Shape::kExpertTiles];
};

template <typename X, typename W, typename Shape>
using Sums = float[Shape::kTokenTiles][Shape::kExpertTiles][kAccumulators];

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
            mma(sums[t][e], upper.pairs[i][step], lower.pairs[i][step], upper.pairs[i][step + 1],
                lower.pairs[i][step + 1], weight[e].pairs[j][step], weight[e].pairs[j][step + 1]);
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

__device__ float element(const LogitsOperand& operand, int index) {
  switch (operand.dtype) {
    case DType::kBF16:
      return static_cast<float>(static_cast<const __nv_bfloat16*>(operand.data)[index]);
    case DType::kF16:
      return static_cast<float>(static_cast<const __half*>(operand.data)[index]);
    default:
      return static_cast<const float*>(operand.data)[index];
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
  cudaGridDependencySynchronize();
  Sums<X, W, Shape> sums = {};
  multiply_part<X, W, Shape>(rows, begin, end, aligned_chunks, p.hidden, sums);

  // Lane 4 g + t holds columns 2 t, 2 t + 1 of rows g and g + 8.
  float* part = partial + warp * Shape::kNumTokens * Shape::kPitch;
#pragma unroll
  for (int t = 0; t < Shape::kTokenTiles; ++t) {
#pragma unroll
    for (int e = 0; e < Shape::kExpertTiles; ++e) {
      float* to =
          part + (t * kTokenTile + lane / 4) * Shape::kPitch + e * kExpertTile + lane % 4 * 2;
      to[0] = sums[t][e][0];
      to[1] = sums[t][e][1];
      to[8 * Shape::kPitch] = sums[t][e][2];
      to[8 * Shape::kPitch + 1] = sums[t][e][3];
    }
  }
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
         Shape::kSharedBytes, static_cast<cudaStream_t>(stream.handle), true, p, expert_blocks,
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
