// Kernels for AVX-512 (F, BW, VL, DQ).
#include "cpu/kernels/dot_int16.h"
#include "cpu/kernels/dot_int8.h"
#include "cpu/kernels/simd_avx512.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : Avx512 {
  /// fp32 products have no totals in registers: larger blocks load fewer operands for a product,
  /// and an Ice Lake core loads hardly more than one vector a cycle.
  static constexpr Tuning kTuning{.rows = 6,  // 24 accumulators, 4 weights, 1 of a row of 32
                                  .vectors = 4,
                                  .totals = true,
                                  .side_by_side = 4,
                                  .strips = {4, 4, 4},
                                  .keeps_scales = false};
};

Kernels make_kernels() {
  Kernels table = f32_kernels<Simd>("avx512");
  add_int8_kernels<Simd, SmallProducts<Simd>, WideProducts<Simd>>(table);
  add_int16_kernels<Simd, PairProducts<Simd>>(table);
  return table;
}

}  // namespace

const Kernels& avx512_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
