// Kernels for AVX2 with AVX-VNNI, whose vpdpbusd adds four int8 products to an int32 accumulator.
#include "cpu/dot_int16.h"
#include "cpu/dot_int8.h"
#include "cpu/simd_avx2.h"

namespace fusedmoe::cpu {
namespace {

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
