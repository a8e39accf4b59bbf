// A fragment of weights, one slice by one K block, so a slice's part of one packed block: how a
// warp reads it from global memory to registers, and multiplies it by the token.
#pragma once

#include <cstring>

#include "cuda/device/e4m3_convert.cuh"
#include "cuda/device/mma_sync.cuh"
#include "cuda/one_token/one_token.h"

namespace fusedmoe::cuda {

/// The elements that mma.sync multiplies: E4M3 numbers as f16, which holds them and their products'
/// factors exactly. (mma.sync of E4M3 is made of the same instructions on Hopper.)
template <typename Operands>
using MmaElement = std::conditional_t<sizeof(typename Operands::Activation) == 1, __half,
                                      typename Operands::Activation>;
template <typename Operands>
inline constexpr bool kIsFp8 = sizeof(typename Operands::Activation) == 1;

/// The two low, or the two high E4M3 codes of a word as f16.
__device__ __forceinline__ std::uint32_t fp8_to_f16(std::uint32_t codes, int half) {
  const __half2 values = from_e4m3(codes >> (16 * half));
  return reinterpret_cast<const std::uint32_t&>(values);
}

/// sums += A (16, K) B (K, 8) of 32 bytes of K of the activations: one instruction, of FP8 two.
/// `b`: the lane's words of B for these instructions, two each.
template <typename Operands>
__device__ __forceinline__ void multiply_16x8(const std::uint32_t (&a)[4], const std::uint32_t* b,
                                              float (&sums)[4]) {
  using Atom = MmaSyncAtom<MmaElement<Operands>>;
  const auto multiply = [&](const std::uint32_t(&w)[4], const std::uint32_t* x) {
    Atom::fma(sums[0], sums[1], sums[2], sums[3], w[0], w[1], w[2], w[3], x[0], x[1], sums[0],
              sums[1], sums[2], sums[3]);
  };
  if constexpr (kIsFp8<Operands>) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t w[4] = {fp8_to_f16(a[0], half), fp8_to_f16(a[1], half),
                                  fp8_to_f16(a[2], half), fp8_to_f16(a[3], half)};
      multiply(w, b + 2 * half);
    }
  } else {
    multiply(a, b);
  }
}

/// A packed block in global memory, which is read once; of one that is not `present` nothing is
/// read, and what read() returns must not be used. Without a branch: where the lanes of a warp meet
/// again they would wait for what they have read.
struct StreamedBlock {
  const std::uint8_t* bytes;
  bool present;

  template <typename T>
  __device__ __forceinline__ T read(int offset) const {
    const std::uint8_t* from = bytes + offset;
    const int predicate = present;
    T value;
#define FUSEDMOE_STREAMED "@p ld.global.nc.L1::no_allocate.L2::256B"
#define FUSEDMOE_IF_PRESENT(N) "{.reg .pred p;\nsetp.ne.s32 p, %" #N ", 0;\n"
    if constexpr (sizeof(T) == 16) {
      asm volatile(FUSEDMOE_IF_PRESENT(5) FUSEDMOE_STREAMED ".v4.u32 {%0, %1, %2, %3}, [%4];}"
                   : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                   : "l"(from), "r"(predicate));
    } else if constexpr (sizeof(T) == 8) {
      std::uint32_t words[2];
      asm volatile(FUSEDMOE_IF_PRESENT(3) FUSEDMOE_STREAMED ".v2.u32 {%0, %1}, [%2];}"
                   : "=r"(words[0]), "=r"(words[1])
                   : "l"(from), "r"(predicate));
      memcpy(&value, words, sizeof(value));
    } else if constexpr (sizeof(T) == 4) {
      asm volatile(FUSEDMOE_IF_PRESENT(2) FUSEDMOE_STREAMED ".u32 %0, [%1];}"
                   : "=r"(value)
                   : "l"(from), "r"(predicate));
    } else {
      static_assert(sizeof(T) == 2);
      asm volatile(FUSEDMOE_IF_PRESENT(2) FUSEDMOE_STREAMED ".u16 %0, [%1];}"
                   : "=h"(value)
                   : "l"(from), "r"(predicate));
    }
#undef FUSEDMOE_STREAMED
#undef FUSEDMOE_IF_PRESENT
    return value;
  }
};

/// A fragment in a warp's registers: codes, which decode() turns into 16 bits.
template <typename Operands>
struct WeightFragment {
  typename Operands::Codes codes;

  /// `thread`: of 128, 32 for each slice of the block.
  __device__ static WeightFragment load(const StreamedBlock& block, int thread) {
    return {Operands::load(block, thread)};
  }
  __device__ void decode(const typename Operands::Tables& /*tables*/, int half,
                         std::uint32_t (&a)[2][4]) const {
    Operands::decode(codes, half, a);
  }
};

/// Decoded to FP8.
template <typename Operands>
requires(Operands::kDecodes &&
         sizeof(typename Operands::Activation) == 1) struct WeightFragment<Operands> {
  uint4 halves[2];
  typename Operands::Scales scales;

  __device__ static WeightFragment load(const StreamedBlock& block, int thread) {
    return {{Operands::words(block, thread, 0), Operands::words(block, thread, 1)},
            Operands::load_scales(block, thread)};
  }
  __device__ void decode(const typename Operands::Tables& tables, int half,
                         std::uint32_t (&a)[2][4]) const {
    Operands::decode(halves[half], scales, tables, half, a);
  }
};

/// As they are. A lane reads 16 bytes of K at a time, so its K is in another order.
template <typename Operands>
requires(!Operands::kDecodes) struct WeightFragment<Operands> {
  uint4 chunks[2][2];  // of rows g and g + 8: chunk q and q + 4

  __device__ static WeightFragment load(const StreamedBlock& block, int thread) {
    const int g = thread % 32 / 4, q = thread % 4;
    const int row = (thread / 32 * 16 + g) * 128;
    WeightFragment fragment;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        fragment.chunks[r][c] = block.read<uint4>(row + r * 8 * 128 + ((q + 4 * c) ^ g) * 16);
      }
    }
    return fragment;
  }
  __device__ void decode(const typename Operands::Tables& /*tables*/, int half,
                         std::uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        a[0][r + 2 * c] = half == 0 ? chunks[r][c].x : chunks[r][c].z;
        a[1][r + 2 * c] = half == 0 ? chunks[r][c].y : chunks[r][c].w;
      }
    }
  }
};

/// Where 4 bytes of activations lie in the fragment of a K block of the token, the other operand of
/// mma.sync: with which lane, in which step, and whether as its second word.
struct FragmentIndex {
  unsigned lane, step, second;
};

/// Where `word` of a K block goes in a fragment. Weights that are decoded have K in the order that
/// wgmma takes it; other weights have it in the order of their 16-byte chunks.
template <typename Operands>
__device__ constexpr FragmentIndex fragment_index(unsigned word) {
  if constexpr (Operands::kDecodes) {
    return {word % 4, word / 8, word / 4 % 2};
  } else {
    return {word / 4 % 4, word % 4, word / 16};
  }
}

/// Words of a K block of the token that a lane multiplies: 4 lanes share it.
template <typename Operands>
inline constexpr int kLaneWords = Operands::kBlock.k* kRowElementBytes / 16;

}  // namespace fusedmoe::cuda
