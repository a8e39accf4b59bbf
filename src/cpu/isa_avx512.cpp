// Kernels for AVX-512 (F, BW, VL, DQ) without BF16 dot products.
#include "cpu/multiply_groups.h"
#include "cpu/simd_avx512.h"

namespace fusedmoe::cpu {
const Kernels kAvx512Kernels = f32_kernels<Simd>("avx512");

}  // namespace fusedmoe::cpu
