// Kernels for AVX2 with FMA.
#include <immintrin.h>

#include "cpu/multiply_groups.h"
#include "cpu/simd_vector.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : SimdVector<8> {
  static constexpr int kVectors = 2;
  static constexpr int kRows = 6;
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace

const Kernels kAvx2Kernels = f32_kernels<Simd>("avx2");

}  // namespace fusedmoe::cpu
