// Kernels for AVX2 with FMA and F16C.
#include "cpu/dot_int16.h"
#include "cpu/dot_int8.h"
#include "cpu/simd_avx2.h"

namespace fusedmoe::cpu {
namespace {

Kernels make_kernels() {
  Kernels table = f32_kernels<Simd>("avx2");
  add_int8_kernels<Simd, SmallProducts<Simd>, WideProducts<Simd>>(table);
  add_int16_kernels<Simd, PairProducts<Simd>>(table);
  return table;
}

}  // namespace

const Kernels& avx2_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
