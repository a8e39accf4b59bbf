// The main loop: what a warpgroup does with one stage. Each warp multiplies 16 weight rows of every
// row block of its row group by all tokens of the tile, by mma.sync.
#pragma once

#include "cuda/device/e4m3_f16.cuh"
#include "cuda/device/mma_fp8.cuh"
#include "cuda/device/mma_sync.cuh"
#include "cuda/formats/codes.h"
#include "cuda/sm80/copies.cuh"

namespace fusedmoe::cuda::sm80 {

/// A warp's weights of one packed block, as they are: read by ldmatrix, whose rows the 128-byte
/// swizzle spreads over all banks.
struct SwizzledSlice {
  std::uint32_t row;
  int chunk, swizzle;

  template <typename Tables>
  __device__ static SwizzledSlice at(const std::uint8_t* block, int thread, const Tables&) {
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

  __device__ static DecodedSlice at(const std::uint8_t* block, int thread,
                                    const typename Operands::Tables&) {
    return {Operands::load(StagedBlock{block}, thread)};
  }
  __device__ void read(int half, std::uint32_t (&a)[2][4]) const {
    Operands::decode(codes, half, a);
  }
};

/// The same of weights that are decoded to E4M3 codes.
template <typename Operands>
struct Fp8DecodedSlice {
  const std::uint8_t* block;
  int thread;
  typename Operands::Scales scales;
  const typename Operands::Tables* tables;

  __device__ static Fp8DecodedSlice at(const std::uint8_t* block, int thread,
                                       const typename Operands::Tables& tables) {
    return {block, thread, Operands::load_scales(StagedBlock{block}, thread), &tables};
  }
  __device__ void read(int half, std::uint32_t (&a)[2][4]) const {
    Operands::decode(Operands::words(StagedBlock{block}, thread, half), scales, *tables, half, a);
  }
};

/// A slice of E4M3 codes, two steps of 32 of K at a time, as four steps of f16.
template <typename Codes>
struct Fp8AsF16Slice {
  Codes codes;

  template <typename Tables>
  __device__ static Fp8AsF16Slice at(const std::uint8_t* block, int thread, const Tables& tables) {
    return {Codes::at(block, thread, tables)};
  }
  __device__ void read(int half, std::uint32_t (&a)[4][4]) const {
    std::uint32_t words[2][4], found = 0;
    codes.read(half, words);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t word = words[i / 4][i % 4];
      set(i, e4m3_to_f16(word), a);
      found |= find_nan(word);
    }
    if (!has_nan(found)) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      OddAndEven values = e4m3_to_f16(words[i / 4][i % 4]);
      mark_nan(words[i / 4][i % 4], values);
      set(i, values, a);
    }
  }

 private:
  /// Word i has the columns of step i / 2, of row g or g + 8.
  __device__ static void set(int i, const OddAndEven& values, std::uint32_t (&a)[4][4]) {
    a[i / 2][i % 2] = values.odd;
    a[i / 2][i % 2 + 2] = values.even;
  }
};

/// The slice of an operand policy, as codes where its rows are FP8.
template <typename Operands>
using CodesOf =
    std::conditional_t<!Operands::kDecodes, SwizzledSlice,
                       std::conditional_t<Operands::kFormat.fp8_rows, Fp8DecodedSlice<Operands>,
                                          DecodedSlice<Operands>>>;
template <typename K>
using SliceOf = std::conditional_t<K::kFp8AsF16, Fp8AsF16Slice<CodesOf<typename K::Operands>>,
                                   CodesOf<typename K::Operands>>;

/// Operands of a K block in shared memory.
template <typename K>
struct BlockOperands {
  const std::uint8_t* weights;  // of the row group, row blocks kRowBlockPitch apart
  std::uint32_t tokens;         // the lane's rows for ldmatrix
  const float* scales;          // of its tokens, then of the tile's slices
  const typename K::Operands::Tables* tables;
};

/// sums += a K block, of the first kTokens tokens.
template <int kTokens, typename K>
__device__ __forceinline__ void multiply_block(const BlockOperands<K>& block,
                                               const WarpgroupCoords<K>& coords,
                                               typename K::Accumulators& accumulators) {
  using Atom = MmaSyncAtom<typename K::Activation>;
  using Slice = SliceOf<K>;
  constexpr int kPairs = K::kHalfSteps / 2;  // of steps, 64 bytes of token rows
  Slice slices[K::kRowBlocks];
#pragma unroll
  for (int b = 0; b < K::kRowBlocks; ++b) {
    slices[b] = Slice::at(block.weights + b * K::kRowBlockPitch, coords.thread(), *block.tables);
  }
  // One copy of the code for both halves where accumulators take half of the registers.
  constexpr bool kIsFull = K::kAllAccumulators >= (K::kPromotes ? 64 : 128);
#pragma unroll kIsFull ? 1 : 2
  for (int half = 0; half < 2; ++half) {
    const std::uint32_t tokens = block.tokens ^ half * (kSwizzleBytes / 2);
    std::uint32_t a[K::kRowBlocks][K::kHalfSteps][4];
#pragma unroll
    for (int b = 0; b < K::kRowBlocks; ++b) slices[b].read(half, a[b]);
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
      // No read of rows passes it: few are on their way at once, and the registers suffice.
      if (!K::kFp8AsF16 && n > 0 && n % 4 == 0) __syncwarp();
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        std::uint32_t k[4];
        if constexpr (kPairs == 1) {
          load_matrices(tokens + n * 8 * kSwizzleBytes, k);
        } else {  // a half of the K block is a part of the rows
          load_matrices((block.tokens + half * K::kPartBytes + n * 8 * kSwizzleBytes) ^
                            pair * (kSwizzleBytes / 2),
                        k);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int b = 0; b < K::kRowBlocks; ++b) {
            typename K::Sum* sums = &accumulators[b][4 * n];
            const std::uint32_t(&w)[4] = a[b][2 * pair + i];
            Atom::fma(sums[0], sums[1], sums[2], sums[3], w[0], w[1], w[2], w[3], k[2 * i],
                      k[2 * i + 1], sums[0], sums[1], sums[2], sums[3]);
          }
        }
      }
    }
  }
}

/// accumulators += the sums of a K block times the scales of its tokens and weight rows.
template <int kTokens, typename K>
__device__ __forceinline__ void promote(const float* scales, const WarpgroupCoords<K>& coords,
                                        const typename K::Accumulators& sums,
                                        typename K::Accumulators& accumulators) {
  const float* of_tokens = scales + coords.thread() % 4 * 2;
  const float* of_rows = scales + K::kMaxTokens + coords.row_group() * K::kRowBlocks * kSlices +
                         coords.thread() / 32 * 2;
#pragma unroll
  for (int b = 0; b < K::kRowBlocks; ++b) {
    const auto rows = *reinterpret_cast<const float2*>(of_rows + b * kSlices);
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
      const auto tokens = *reinterpret_cast<const float2*>(of_tokens + 8 * n);
      const float* from = &sums[b][4 * n];
      float* to = &accumulators[b][4 * n];
      to[0] += from[0] * (rows.x * tokens.x);
      to[1] += from[1] * (rows.x * tokens.y);
      to[2] += from[2] * (rows.y * tokens.x);
      to[3] += from[3] * (rows.y * tokens.y);
    }
  }
}

/// The same without scales.
template <int kTokens, typename K>
__device__ __forceinline__ void add_sums(const typename K::Accumulators& sums,
                                         typename K::Accumulators& accumulators) {
#pragma unroll
  for (int b = 0; b < K::kRowBlocks; ++b) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) accumulators[b][i] += sums[b][i];
  }
}

/// accumulators += a K block, of the first kTokens tokens.
template <int kTokens, typename K>
__device__ __forceinline__ void add_block(const BlockOperands<K>& block,
                                          const WarpgroupCoords<K>& coords,
                                          typename K::Accumulators& accumulators) {
  if constexpr (K::kPromotes) {
    typename K::Accumulators sums = {};
    multiply_block<kTokens>(block, coords, sums);
    if constexpr (K::kHasKScales) {
      promote<kTokens>(block.scales, coords, sums, accumulators);
    } else {
      add_sums<kTokens, K>(sums, accumulators);
    }
  } else {
    multiply_block<kTokens>(block, coords, accumulators);
  }
}

/// With the fewest steps of tokens, kTokens at least, that cover the tile's. Without branches
/// inside, so that operands of the next instructions are read ahead.
template <int kTokens, typename K>
__device__ __forceinline__ void add_narrowest(const BlockOperands<K>& block, int num_tokens,
                                              const WarpgroupCoords<K>& coords,
                                              typename K::Accumulators& accumulators) {
  if constexpr (kTokens < K::kMaxTokens) {
    if (num_tokens > kTokens) {
      add_narrowest<kTokens + K::kTile.token_step()>(block, num_tokens, coords, accumulators);
      return;
    }
  }
  add_block<kTokens>(block, coords, accumulators);
}

/// accumulators += the stage's first `blocks` K blocks, of those that it has for this warpgroup.
template <typename K>
__device__ __forceinline__ void multiply_stage(const typename K::Operands::Tables& tables,
                                               const std::uint8_t* stage, int blocks,
                                               int num_tokens, const WarpgroupCoords<K>& coords,
                                               typename K::Accumulators& accumulators) {
  const int lane = coords.thread() % 32, first = coords.k_group() * K::kDepth;
  const int row_block = coords.row_group() * K::kRowBlocks;
  BlockOperands<K> block;
  block.tokens = cute::cast_smem_ptr_to_uint(stage) + first * K::kActivationBytes +
                 lane % 8 * kSwizzleBytes + (lane / 8 ^ lane % 8) * 16;
  block.weights =
      stage + K::kWeightsOffset + row_block * K::kRowBlockPitch + first * K::kBlockBytes;
  block.scales = reinterpret_cast<const float*>(stage + K::kScalesOffset) + first * K::kScales;
  block.tables = &tables;
#pragma unroll
  for (int k = 0; k < K::kDepth; ++k) {
    if (k >= blocks) break;
    add_narrowest<K::kTile.token_step()>(block, num_tokens, coords, accumulators);
    block.tokens += K::kActivationBytes;
    block.weights += K::kBlockBytes;
    block.scales += K::kScales;
  }
}

}  // namespace fusedmoe::cuda::sm80
