// The main loop: what a warpgroup does with one stage. Each warp multiplies 16 weight rows of every
// row block by all tokens of the tile, by mma.sync.
#pragma once

#include "cuda/device/mma_sync.cuh"
#include "cuda/formats/codes.h"
#include "cuda/sm80/copies.cuh"

namespace fusedmoe::cuda::sm80 {

/// A warp's weights of one packed block, as they are: read by ldmatrix, whose rows the 128-byte
/// swizzle spreads over all banks.
struct SwizzledSlice {
  std::uint32_t row;
  int chunk, swizzle;

  __device__ static SwizzledSlice at(const std::uint8_t* block, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
    return {cute::cast_smem_ptr_to_uint(block) + row * kSwizzleBytes, lane / 16, row % 8};
  }
  /// The operands of two steps, of one half of the K block.
  __device__ void read(int half, std::uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(row + ((4 * half + 2 * i + chunk) ^ swizzle) * 16, a[i]);
    }
  }
};

/// The same of weights that are decoded.
template <typename Operands>
struct DecodedSlice {
  typename Operands::Codes codes;

  __device__ static DecodedSlice at(const std::uint8_t* block, int thread) {
    return {Operands::load(StagedBlock{block}, thread)};
  }
  __device__ void read(int half, std::uint32_t (&a)[2][4]) const {
    Operands::decode(codes, half, a);
  }
};

template <typename K>
using WeightSlice =
    std::conditional_t<K::Operands::kDecodes, DecodedSlice<typename K::Operands>, SwizzledSlice>;

/// accumulators += a K block: of the weights that start at `weights`, kRowBlockPitch apart, and of
/// the first kTokens tokens at `tokens`, which are the lane's rows for ldmatrix.
template <int kTokens, typename K>
__device__ __forceinline__ void multiply_block(const std::uint8_t* weights, std::uint32_t tokens,
                                               const WarpgroupCoords<K>& coords,
                                               typename K::Accumulators& accumulators) {
  using Atom = MmaSyncAtom<typename K::Activation>;
  using Slice = WeightSlice<K>;
  Slice slices[K::kRowBlocks];
#pragma unroll
  for (int b = 0; b < K::kRowBlocks; ++b) {
    slices[b] = Slice::at(weights + b * K::kRowBlockPitch, coords.thread());
  }
  // One copy of the code for both halves where accumulators take half of the registers.
  constexpr int kUnrolled = K::kAllAccumulators >= 128 && K::Operands::kDecodes ? 1 : 2;
#pragma unroll kUnrolled
  for (int half = 0; half < 2; ++half) {
    std::uint32_t a[K::kRowBlocks][2][4];
#pragma unroll
    for (int b = 0; b < K::kRowBlocks; ++b) slices[b].read(half, a[b]);
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
      std::uint32_t k[4];
      load_matrices((tokens + n * 8 * kSwizzleBytes) ^ half * (kSwizzleBytes / 2), k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int b = 0; b < K::kRowBlocks; ++b) {
          float* sums = &accumulators[b][4 * n];
          const std::uint32_t(&w)[4] = a[b][i];
          Atom::fma(sums[0], sums[1], sums[2], sums[3], w[0], w[1], w[2], w[3], k[2 * i],
                    k[2 * i + 1], sums[0], sums[1], sums[2], sums[3]);
        }
      }
    }
  }
}

/// With the fewest tokens that cover the tile's: all, or in tiles of more than 32 half of them.
/// Without branches inside, so that operands of the next instructions are read ahead.
template <int kTokens, typename K>
__device__ __forceinline__ void multiply_narrowest(const std::uint8_t* weights,
                                                   std::uint32_t tokens, int num_tokens,
                                                   const WarpgroupCoords<K>& coords,
                                                   typename K::Accumulators& accumulators) {
  if constexpr (kTokens < K::kMaxTokens) {
    if (num_tokens > kTokens) {
      multiply_narrowest<K::kMaxTokens>(weights, tokens, num_tokens, coords, accumulators);
      return;
    }
  }
  multiply_block<kTokens>(weights, tokens, coords, accumulators);
}

/// accumulators += the stage's first `blocks` K blocks, of those that it has for this warpgroup.
template <typename K>
__device__ __forceinline__ void multiply_stage(const std::uint8_t* stage, int blocks,
                                               int num_tokens, const WarpgroupCoords<K>& coords,
                                               typename K::Accumulators& accumulators) {
  const int lane = coords.thread() % 32, first = coords.k_group() * K::kDepth;
  const std::uint32_t tokens = cute::cast_smem_ptr_to_uint(stage) + first * K::kActivationBytes +
                               lane % 8 * kSwizzleBytes + (lane / 8 ^ lane % 8) * 16;
  const std::uint8_t* weights = stage + K::kWeightsOffset +
                                coords.row_group() * K::kRowBlocks * K::kRowBlockPitch +
                                first * K::kBlockBytes;
#pragma unroll
  for (int k = 0; k < K::kDepth; ++k) {
    if (k >= blocks) break;
    multiply_narrowest<K::kMaxTokens <= 32 ? K::kMaxTokens : K::kMaxTokens / 2>(
        weights + k * K::kBlockBytes, tokens + k * K::kActivationBytes, num_tokens, coords,
        accumulators);
  }
}

}  // namespace fusedmoe::cuda::sm80
