// Operands of the tensor cores, from rows of f32, bf16 or f16 in global memory.
//
// Tensor cores multiply bf16 exactly and add in fp32. An f16 or f32 number is split into the two or
// three bf16 numbers that add up to it, so every product is exact whatever the dtypes. (Infinities
// are not split: outside bf16 they give NaN.)
//
// A dot product may take its columns in any order that is the same for both operands. So of a chunk
// of 32 columns, lane t of a quad takes columns 8 t ... 8 t + 7, as one 16-byte load of 16-bit
// numbers: the first half for one mma, the second for the next.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fusedmoe::cuda {

constexpr int kChunk = 32;            // columns
constexpr int kLaneColumns = 8;       // of a chunk
constexpr int kTokenTile = 16;        // rows of one mma
constexpr int kExpertTile = 8;        // columns of one mma
constexpr int kLaneAccumulators = 4;  // of one mma and lane

/// How many bf16 numbers one element is: significant bits / 8, rounded up.
template <typename T>
constexpr int kPieces = std::is_same_v<T, float>    ? 3
                        : std::is_same_v<T, __half> ? 2
                                                    : 1;

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

/// accumulators (16, 8) += a (16, 16) b (16, 8). Lane 4 g + t has columns (or rows of b) 2 t, 2 t +
/// 1 in a0, a1, b0 and those plus 8 in a2, a3, b1; of row g in a0, a2 and of row g + 8 in a1, a3.
__device__ inline void mma(float (&accumulators)[kLaneAccumulators], std::uint32_t a0,
                           std::uint32_t a1, std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                           std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(accumulators[0]), "+f"(accumulators[1]), "+f"(accumulators[2]), "+f"(accumulators[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace fusedmoe::cuda
