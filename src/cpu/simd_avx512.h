// The AVX-512 policy shared by the plain, the BF16 and the AMX kernels. Included by isa_avx512*.cpp
// and isa_amx.cpp only.
#pragma once

#include <immintrin.h>

#include "cpu/simd_vector.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : SimdVector<16> {
  static constexpr int kVectors = 4;
  static constexpr int kRows = 6;  // 24 accumulators, 4 weights, 1 broadcast of 32 registers
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace fusedmoe::cpu
