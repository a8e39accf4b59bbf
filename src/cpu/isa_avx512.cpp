// Kernels for AVX-512 (F, BW, VL, DQ) without BF16 dot products.
#include "cpu/multiply.h"
#include "cpu/simd_avx512.h"

namespace fusedmoe::cpu {
namespace {
using Dot = DotF32<Simd>;
}  // namespace

const Kernels kAvx512Kernels = {"avx512",
                                false,
                                {{multiply<Dot, Direct>, nullptr},
                                 {multiply<Dot, Bf16ToF32<Simd>>, nullptr},
                                 {multiply<Dot, Mxfp4ToF32<Simd>>, nullptr}},
                                reduce<Simd>,
                                {convert_to_f32, nullptr},
                                {flops<Dot>, nullptr}};

}  // namespace fusedmoe::cpu
