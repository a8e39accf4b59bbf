// Kernels for AVX2 with AVX-VNNI, whose vpdpbusd adds four int8 products to an int32 accumulator.
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

struct Vnni {
  static Simd::I dot(Simd::I acc, Simd::I b, Simd::I a) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(b), "x"(a));
    return acc;
  }
};

struct VnniWords {
  static Simd::I dot(Simd::I acc, Simd::I b, Simd::I a) {
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(b), "x"(a));
    return acc;
  }
};

Kernels make_kernels() {
  Kernels table = avx2_kernels();
  table.name = "avx2_vnni";
  add_int8_kernels<Simd, Vnni>(table);
  add_int16_kernels<Simd, VnniWords>(table);
  return table;
}

}  // namespace

const Kernels& avx2_vnni_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
