// Kernels for AVX-512 (F, BW, VL, DQ).
#include "cpu/dot_int16.h"
#include "cpu/dot_int8.h"
#include "cpu/simd_avx512.h"

namespace fusedmoe::cpu {
namespace {

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
