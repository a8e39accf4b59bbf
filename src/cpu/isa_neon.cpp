// Kernels for 64-bit ARM with what all of them have.
#include "cpu/dot_int8.h"
#include "cpu/simd_neon.h"

namespace fusedmoe::cpu {
namespace {

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
