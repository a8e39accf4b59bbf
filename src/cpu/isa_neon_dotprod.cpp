// Kernels for 64-bit ARM with SDOT, which adds four products of signed bytes to an int32.
#include "cpu/kernels/dot_int8.h"
#include "cpu/kernels/simd_neon.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : Neon {
  static constexpr Tuning kTuning{
      .rows = 6,  // 24 accumulators, 4 weights, 1 of a row of 32
      .vectors = 4,
      .totals = true,
      .f32_totals = true,
      .strips = {8, 8, 4}  // leave room for decoding
  };
};

inline int32x4_t sdot(Simd::I acc, Simd::I b, Simd::I a) {
  return vdotq_s32((int32x4_t)acc, (int8x16_t)b, (int8x16_t)a);
}

/// Codes of up to 7 bits are the same bytes signed.
struct SmallDot {
  static Simd::I dot(Simd::I acc, Simd::I b, Simd::I a) { return (Simd::I)sdot(acc, b, a); }
};

/// 8-bit codes as 16 x high + low.
struct WideDot {
  static Simd::I dot(Simd::I acc, Simd::I b, Simd::I a) {
    const int32x4_t high = sdot(Simd::I{}, (b >> 4) & bytes4(15), a);
    return (Simd::I)vaddq_s32(sdot(acc, b & bytes4(15), a), vshlq_n_s32(high, 4));
  }
};

Kernels make_kernels() {
  Kernels table = neon_kernels();
  table.name = "neon_dotprod";
  add_int8_kernels<Simd, SmallDot, WideDot>(table);
  return table;
}

}  // namespace

const Kernels& neon_dotprod_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
