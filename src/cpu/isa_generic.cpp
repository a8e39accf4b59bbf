// Kernels for any x86-64 (SSE2) or other CPU: 4-lane vectors that the compiler lowers.
#include "cpu/multiply.h"
#include "cpu/simd_vector.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : SimdVector<4> {
  static constexpr int kVectors = 2;
  static constexpr int kRows = 4;
  static F fma(F a, F b, F c) { return a * b + c; }
};

using Dot = DotF32<Simd>;

}  // namespace

const Kernels kGenericKernels = {"generic",
                                 false,
                                 {{multiply<Dot, Direct>, nullptr},
                                  {multiply<Dot, Bf16ToF32<Simd>>, nullptr},
                                  {multiply<Dot, Mxfp4ToF32<Simd>>, nullptr}},
                                 reduce<Simd>,
                                 {convert_to_f32, nullptr},
                                 {flops<Dot>, nullptr}};

}  // namespace fusedmoe::cpu
