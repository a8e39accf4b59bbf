// Weight formats of the Hopper GEMMs as policies: how a record in shared memory becomes the 64-row
// operand of wgmma. A new format is a new policy here and a new packer.
#pragma once

#include <cstdint>

#include "cuda/device/wgmma.cuh"
#include "cuda/gemm/records.h"

namespace fusedmoe::cuda {

/// As they are: wgmma reads the record itself.
struct Bf16Weights {
  static constexpr WeightFormat kFormat = WeightFormat::kBF16;
  static constexpr bool kDecoded = false;
};

/// Decoded to bf16 in registers, exactly.
struct Mxfp4Weights {
  static constexpr WeightFormat kFormat = WeightFormat::kMXFP4;
  static constexpr bool kDecoded = true;

  __device__ static std::uint32_t multiply_bf16x2(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  }

  /// 8 codes of two rows (see records.h) and the rows' multipliers -> one register operand.
  __device__ static void decode_word(std::uint32_t word, std::uint32_t low, std::uint32_t high,
                                     std::uint32_t (&a)[4]) {
    constexpr std::uint32_t kMask = 0x81C081C0;  // sign and the three bits below the exponent's
    const std::uint32_t last =
        ((word << 1) & 0x80008000) | ((word >> 3) & 0x01800180) | ((word >> 7) & 0x00400040);
    a[0] = multiply_bf16x2(word & kMask, low);
    a[1] = multiply_bf16x2((word << 3) & kMask, high);
    a[2] = multiply_bf16x2((word << 6) & kMask, low);
    a[3] = multiply_bf16x2(last, high);
  }

  /// One record -> the register operands of four steps of 16 of K, for one thread of 128.
  __device__ static void decode(const std::uint8_t* record, int thread,
                                std::uint32_t (&a)[kRecordK / 16][4]) {
    const auto codes = *reinterpret_cast<const uint4*>(record + thread * 16);
    const std::uint32_t exponents = *reinterpret_cast<const std::uint32_t*>(
        record + kMxfp4CodeBytes + (thread / 32 * 8 + thread % 32 / 4) * 4);
    std::uint32_t scale[4];  // a bf16 of that exponent field, twice
#pragma unroll
    for (int i = 0; i < 4; ++i) scale[i] = (exponents >> (8 * i) & 0xff) * 0x00800080u;
    decode_word(codes.x, scale[0], scale[2], a[0]);
    decode_word(codes.y, scale[0], scale[2], a[1]);
    decode_word(codes.z, scale[1], scale[3], a[2]);
    decode_word(codes.w, scale[1], scale[3], a[3]);
  }
};

}  // namespace fusedmoe::cuda
