// Kernels for 64-bit ARM with USDOT, which adds four products of unsigned and signed bytes to an
// int32.
#include "cpu/dot_int8.h"
#include "cpu/simd_neon.h"

namespace fusedmoe::cpu {
namespace {

struct UsDot {
  static Simd::I dot(Simd::I acc, Simd::I b, Simd::I a) {
    return (Simd::I)vusdotq_s32((int32x4_t)acc, (uint8x16_t)b, (int8x16_t)a);
  }
};

Kernels make_kernels() {
  Kernels table = neon_dotprod_kernels();
  table.name = "neon_i8mm";
  add_int8_kernels<Simd, UsDot>(table);
  return table;
}

}  // namespace

const Kernels& neon_i8mm_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
