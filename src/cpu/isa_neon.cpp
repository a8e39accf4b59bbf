// Kernels for 64-bit ARM with what all of them have.
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

Kernels make_kernels() {
  Kernels table = f32_kernels<Simd>("neon");
  add_int8_kernels<Simd, SmallProducts<Simd>, WideProducts<Simd>>(table);
  return table;
}

}  // namespace

const Kernels& neon_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
