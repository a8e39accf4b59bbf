// Kernels for any x86-64 (SSE2) or other CPU: 4-lane vectors that the compiler lowers.
#include "cpu/kernels/dot_f32.h"
#include "cpu/kernels/simd_vector.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : SimdVector<4> {
  static constexpr Tuning kTuning{.rows = 4, .vectors = 2, .strips = {2, 2, 2}};
  static F fma(F a, F b, F c) { return a * b + c; }
};

}  // namespace

const Kernels& generic_kernels() {
  static const Kernels table = f32_kernels<Simd>("generic");
  return table;
}

}  // namespace fusedmoe::cpu
