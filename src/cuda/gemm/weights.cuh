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

  __device__ static std::uint32_t multiply_bf16x2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  }

  static constexpr std::uint32_t kMask = 0x81C081C0;  // sign, and three bits around the point

  /// The codes of two words (see records.h), whose left-over bits make up two more pairs, times the
  /// rows' multipliers -> two register operands. Shifts to the left go to another pipe than masks.
  __device__ static void decode_words(std::uint32_t x, std::uint32_t y, std::uint32_t low,
                                      std::uint32_t high, std::uint32_t (&a)[4],
                                      std::uint32_t (&b)[4]) {
    const std::uint32_t rest =
        ((x << 1) & 0x90009000) | ((y >> 6) & 0x01B001B0) | ((x >> 7) & 0x00480048);
    a[0] = multiply_bf16x2(x & kMask, low);
    a[1] = multiply_bf16x2((x << 3) & kMask, high);
    a[2] = multiply_bf16x2((x << 6) & kMask, low);
    a[3] = multiply_bf16x2(rest & kMask, high);
    b[0] = multiply_bf16x2(y & kMask, low);
    b[1] = multiply_bf16x2((y << 3) & kMask, high);
    b[2] = multiply_bf16x2((y << 6) & kMask, low);
    b[3] = multiply_bf16x2((rest << 3) & kMask, high);
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

  /// -> the register operands of four steps of 16 of K.
  __device__ static void decode(const Codes& codes, std::uint32_t (&a)[kRecordK / 16][4]) {
    std::uint32_t scale[4];  // a bf16 of that exponent field, twice
#pragma unroll
    for (int i = 0; i < 4; ++i)
      scale[i] = __byte_perm(codes.exponents, 0, 0x4440 + i) * 0x00800080u;
    decode_words(codes.words.x, codes.words.y, scale[0], scale[2], a[0], a[1]);
    decode_words(codes.words.z, codes.words.w, scale[1], scale[3], a[2], a[3]);
  }
};

}  // namespace fusedmoe::cuda
