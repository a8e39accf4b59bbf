// Kernels for any x86-64 (SSE2) or other CPU: 4-lane vectors that the compiler lowers.
#include "cpu/dot_f32.h"
#include "cpu/simd_vector.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : SimdVector<4> {
  static constexpr int kVectors = 2;
  static constexpr int kRows = 4;
  static constexpr bool kTotalsInRegisters = false;  // of groups, beside accumulators
  static constexpr int kStreamTiles = 1;
  static constexpr bool kInterleaves = false;  // products of vectors of a stream
  static constexpr int stream_vectors(int) { return 2; }
  static F fma(F a, F b, F c) { return a * b + c; }
};

}  // namespace

const Kernels& generic_kernels() {
  static const Kernels table = f32_kernels<Simd>("generic");
  return table;
}

}  // namespace fusedmoe::cpu
