// The vectors of the levels of 64-bit ARM. Included by isa_neon*.cpp only.
#pragma once

#include <arm_neon.h>

#include "cpu/kernels/simd_vector.h"

namespace fusedmoe::cpu {
namespace {

struct Neon : SimdVector<4> {
  static F fma(F a, F b, F c) {
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  }
  static F set1(float value) { return (F)vdupq_n_f32(value); }
  static I set1_words(std::int32_t value) { return (I)vdupq_n_s32(value); }
  static I load_u8(const std::byte* p) {
    std::uint32_t four;
    std::memcpy(&four, p, 4);
    const uint8x8_t codes = vcreate_u8(four);
    return (I)vmovl_u16(vget_low_u16(vmovl_u8(codes)));
  }
  static I load_u16(const std::byte* p) {
    return (I)vmovl_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(p)));
  }
  static F load_bf16(const std::byte* p) { return as_float(load_u16(p) << 16); }
  static F load_f16(const std::byte* p) {
    const uint16x4_t codes = vld1_u16(reinterpret_cast<const std::uint16_t*>(p));
    return (F)vcvt_f32_f16(vreinterpret_f16_u16(codes));
  }
  static void to_f16(std::uint16_t* codes, F value) {
    vst1_u16(codes, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)value)));
  }

  // Bytes: four in each 32-bit word. A look-up gives 0 for indices of 16 and more.
  static constexpr std::uint8_t kEntry8OrZero = 8;
  using Table = uint8x16_t;
  static Table table(const std::uint8_t (&bytes)[16]) { return vld1q_u8(bytes); }
  static I lookup(Table table, I indices) { return (I)vqtbl1q_u8(table, (uint8x16_t)indices); }
  static I unpack_low(I low, I high) { return (I)vzip1q_u8((uint8x16_t)low, (uint8x16_t)high); }
  static I unpack_high(I low, I high) { return (I)vzip2q_u8((uint8x16_t)low, (uint8x16_t)high); }
  /// Products of bytes, the first at most 127; two of neighbours added in 16 bits.
  static I multiply_bytes(I unsigned_bytes, I signed_bytes) {
    const auto a = (int8x16_t)unsigned_bytes, b = (int8x16_t)signed_bytes;
    return (I)vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
  }
  /// Two neighbouring 16-bit values times `factor`, added in 32 bits.
  static I add_pairs(I pairs, std::int32_t factor) {
    return (I)vpaddlq_s16((int16x8_t)pairs) * factor;
  }
};

}  // namespace
}  // namespace fusedmoe::cpu
