// Weight formats of the Hopper GEMMs as policies: how a record in shared memory becomes the 64-row
// operand of wgmma. A new format is a new policy here and a new packer.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/records.h"

namespace fusedmoe::cuda {

/// As they are: wgmma reads the record itself.
struct Bf16Weights {
  static constexpr WeightFormat kFormat = WeightFormat::kBF16;
  using Element = __nv_bfloat16;  ///< of the rows that are multiplied, and of results
  static constexpr int kDepth = 1;
};
struct F16Weights {
  static constexpr WeightFormat kFormat = WeightFormat::kF16;
  using Element = __half;
  static constexpr int kDepth = 1;
};

/// Decoded to bf16 in registers, exactly.
struct Mxfp4Weights {
  static constexpr WeightFormat kFormat = WeightFormat::kMXFP4;
  using Element = __nv_bfloat16;
  /// Records that a warpgroup takes at once: what a stage costs beside them is shared.
  static constexpr int kDepth = 2;

  static constexpr std::uint32_t kMask = 0x81C081C0;  // sign, and three bits around the point

  /// The pair in the masked bits, times a multiplier.
  __device__ static std::uint32_t decode_pair(std::uint32_t bits, __nv_bfloat162 multiplier) {
    bits &= kMask;
    const __nv_bfloat162 pair = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), multiplier);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }

  /// The codes of two words (see records.h), whose left-over bits make up two more pairs, times the
  /// rows' multipliers -> two register operands. Shifts to the left go to another pipe than masks.
  __device__ static void decode_words(std::uint32_t x, std::uint32_t y, std::uint32_t multipliers,
                                      std::uint32_t (&a)[4], std::uint32_t (&b)[4]) {
    // Both halves of a pair from one: the multiplication takes it so, at no cost.
    const auto& both = reinterpret_cast<const __nv_bfloat162&>(multipliers);
    const __nv_bfloat162 row = __low2bfloat162(both), next = __high2bfloat162(both);
    const std::uint32_t rest =
        ((x << 1) & 0x90009000) | ((y >> 6) & 0x01B001B0) | ((x >> 7) & 0x00480048);
    a[0] = decode_pair(x, row);
    a[1] = decode_pair(x << 3, next);
    a[2] = decode_pair(x << 6, row);
    a[3] = decode_pair(rest, next);
    b[0] = decode_pair(y, row);
    b[1] = decode_pair(y << 3, next);
    b[2] = decode_pair(y << 6, row);
    b[3] = decode_pair(rest << 3, next);
  }

  /// What one thread of 128 needs of a record.
  struct Codes {
    uint4 words;
    std::uint32_t exponents;
  };
  __device__ static Codes load(const std::uint8_t* record, int thread) {
    return {*reinterpret_cast<const uint4*>(record + thread * 16),
            *reinterpret_cast<const std::uint32_t*>(record + kMxfp4CodeBytes +
                                                    (thread / 32 * 8 + thread % 32 / 4) * 4)};
  }

  /// -> the register operands of two steps of 16 of K, of the first or second half of the record.
  __device__ static void decode(const Codes& codes, int half, std::uint32_t (&a)[2][4]) {
    constexpr std::uint32_t kExponents = 0x7F807F80;  // of two bf16: rows (g, g + 8)
    if (half == 0) {
      decode_words(codes.words.x, codes.words.y, codes.exponents << 7 & kExponents, a[0], a[1]);
    } else {
      decode_words(codes.words.z, codes.words.w, codes.exponents >> 1 & kExponents, a[0], a[1]);
    }
  }
};

}  // namespace fusedmoe::cuda
