// E4M3 numbers as f16, which holds each of them exactly, for tensor cores that multiply no FP8.
//
// A 32-bit word holds the codes of four neighbouring columns, 0 to 3. One register of f16 holds two
// numbers, 16 bits apart, and so lie columns 1 and 3 of the word, and columns 0 and 2. So one
// register takes the odd columns and another the even ones. The f16 rows that are multiplied by
// such weights have the same order: of each 16 columns first the eight odd ones, then the even.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace fusedmoe::cuda {

/// Pairs of f16 numbers.
struct OddAndEven {
  std::uint32_t odd, even;
};

/// The codes in the high bytes of each half with exponent and mantissa in their places of f16: 2^-8
/// times their numbers.
__device__ __forceinline__ __half2 small_e4m3(std::uint32_t high_bytes) {
  const std::uint32_t bits = (high_bytes & 0x80008000) | (high_bytes >> 1 & 0x3F803F80);
  return reinterpret_cast<const __half2&>(bits);
}

/// Of four codes. NaN becomes a number, see find_nan() and mark_nan().
__device__ __forceinline__ OddAndEven e4m3_to_f16(std::uint32_t codes) {
  const auto numbers = [](std::uint32_t high_bytes) {
    const __half2 result = __hmul2(small_e4m3(high_bytes), __float2half2_rn(256));
    return reinterpret_cast<const std::uint32_t&>(result);
  };
  return {numbers(codes), numbers(codes << 8)};
}

/// Sets the top bit of each byte whose code is NaN; the other bits mean nothing.
__device__ __forceinline__ std::uint32_t find_nan(std::uint32_t codes) {
  return (codes & 0x7F7F7F7F) + 0x01010101;
}
__device__ __forceinline__ bool has_nan(std::uint32_t found) {
  return (found & 0x80808080) != 0;
}

/// Makes NaN what find_nan() found.
__device__ inline void mark_nan(std::uint32_t codes, OddAndEven& values) {
  const std::uint32_t found = find_nan(codes) & 0x80808080;
  values.odd |= (found >> 15 & 0x00010001) * 0x7FFF;
  values.even |= (found >> 7 & 0x00010001) * 0x7FFF;
}

}  // namespace fusedmoe::cuda
