// Kernels for AVX2 with FMA.
#include <immintrin.h>

#include "cpu/multiply.h"
#include "cpu/simd_vector.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : SimdVector<8> {
  static constexpr int kVectors = 2;
  static constexpr int kRows = 6;
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
};

using Dot = DotF32<Simd>;

}  // namespace

const Kernels kAvx2Kernels = {"avx2",
                              false,
                              {{multiply<Dot, Direct>, nullptr},
                               {multiply<Dot, Bf16ToF32<Simd>>, nullptr},
                               {multiply<Dot, Mxfp4ToF32<Simd>>, nullptr}},
                              reduce<Simd>,
                              {convert_to_f32, nullptr},
                              {flops<Dot>, nullptr}};

}  // namespace fusedmoe::cpu
