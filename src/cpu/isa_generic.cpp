// Kernels for any x86-64 (SSE2) or other CPU: 4-lane vectors that the compiler lowers.
#include "cpu/multiply_groups.h"
#include "cpu/simd_vector.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : SimdVector<4> {
  static constexpr int kVectors = 2;
  static constexpr int kRows = 4;
  static F fma(F a, F b, F c) { return a * b + c; }
};

}  // namespace

const Kernels kGenericKernels = f32_kernels<Simd>("generic");

}  // namespace fusedmoe::cpu
