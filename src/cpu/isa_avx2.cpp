// Kernels for AVX2 with FMA and F16C.
#include "cpu/kernels/dot_int16.h"
#include "cpu/kernels/dot_int8.h"
#include "cpu/kernels/simd_avx2.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : Avx2 {
  static constexpr Tuning kTuning{.rows = 6,  // 12 accumulators, 2 weights, 1 of a row of 16
                                  .vectors = 2,
                                  .strips = {8, 4, 2},  // leave room for decoding
                                  .converts_integers = true,
                                  .vectors_in_turn = 2,
                                  .stepwise_vectors = 2,
                                  .loop_apart = true};
};

/// The products of two steps are added in 16 bits, which hold four of 24 x 128.
struct PairedProducts : SmallProducts<Simd> {
  static Simd::I dot2(Simd::I acc, const Simd::I (&b)[2], const Simd::I (&a)[2]) {
    const auto first = (__m256i)Simd::multiply_bytes(b[0], a[0]);
    const auto second = (__m256i)Simd::multiply_bytes(b[1], a[1]);
    return acc + Simd::add_pairs((Simd::I)_mm256_add_epi16(first, second), 1);
  }
};

Kernels make_kernels() {
  Kernels table = f32_kernels<Simd>("avx2");
  add_int8_kernels<Simd, PairedProducts, WideProducts<Simd>>(table);
  add_int16_kernels<Simd, PairProducts<Simd>>(table);
  return table;
}

}  // namespace

const Kernels& avx2_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
