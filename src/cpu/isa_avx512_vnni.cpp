// Kernels for AVX-512 with VNNI, whose vpdpbusd adds four int8 products to an int32 accumulator.
#include "cpu/kernels/dot_int16.h"
#include "cpu/kernels/dot_int8.h"
#include "cpu/kernels/simd_avx512.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : Avx512 {
  static constexpr Tuning kTuning{.rows = 6,  // 24 accumulators, 4 weights, 1 of a row of 32
                                  .vectors = 4,
                                  .totals = true,
                                  .side_by_side = 4,
                                  .strips = {4, 4, 4},
                                  .keeps_scales = false,
                                  .most_nibbles = 12};
};

struct Vnni {
  /// NOTE: assembly, because GCC 12 copies the accumulators around the intrinsic.
  static Simd::I dot(Simd::I acc, Simd::I b, Simd::I a) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(b), "v"(a));
    return acc;
  }
};

struct VnniWords {
  static Simd::I dot(Simd::I acc, Simd::I b, Simd::I a) {
    asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(b), "v"(a));
    return acc;
  }
};

Kernels make_kernels() {
  Kernels table = avx512_kernels();
  table.name = "avx512_vnni";
  add_int8_kernels<Simd, Vnni>(table);
  add_int16_kernels<Simd, VnniWords>(table);
  return table;
}

}  // namespace

const Kernels& avx512_vnni_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
