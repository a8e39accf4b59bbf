// Kernels for 64-bit ARM with I8MM. USDOT adds four products of unsigned and signed bytes to an
// int32. USMMLA multiplies two matrices of 2 x 8 bytes, which is twice as many products.
#include "cpu/kernels/dot_int8.h"
#include "cpu/kernels/simd_neon.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : Neon {
  /// Six rows are three pairs, with 24 accumulators of 32 registers; so there is no room for
  /// totals.
  static constexpr Tuning kTuning{.rows = 6, .vectors = 4, .strips = {8, 8, 4}};
};

struct UsDot {
  using I = Simd::I;
  static I dot(I acc, I b, I a) {
    return (I)vusdotq_s32((int32x4_t)acc, (uint8x16_t)b, (int8x16_t)a);
  }

  /// As add_products(). Two steps are the 8 bytes of k that a matrix has. Its two weight columns
  /// are words of both steps side by side; its results are (column, row), so the accumulators of
  /// two rows are interleaved meanwhile.
  template <int R, int kVectors>
  static void add_matrices(I (&acc)[R][kVectors], const std::byte* b,
                           const std::byte* const (&rows)[R], std::int64_t a, std::int64_t steps) {
    constexpr int kPairs = R / 2;
    int32x4_t sums[kPairs > 0 ? kPairs : 1][kVectors][2];
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const auto first = (int32x4_t)acc[2 * p][v], second = (int32x4_t)acc[2 * p + 1][v];
        sums[p][v][0] = vzip1q_s32(first, second);
        sums[p][v][1] = vzip2q_s32(first, second);
      }
    }
    std::int64_t left = steps;
    for (; left >= 2; left -= 2, b += 2 * kStepBytes, a += 8) {
      int8x16_t pairs[kPairs > 0 ? kPairs : 1];
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        pairs[p] = vcombine_s8(load_8(rows[2 * p] + a), load_8(rows[2 * p + 1] + a));
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const I now = Simd::load_words(b + v * 16),
                next = Simd::load_words(b + kStepBytes + v * 16);
        const auto low = (uint8x16_t)vzip1q_s32((int32x4_t)now, (int32x4_t)next);
        const auto high = (uint8x16_t)vzip2q_s32((int32x4_t)now, (int32x4_t)next);
#pragma GCC unroll 4
        for (int p = 0; p < kPairs; ++p) {
          sums[p][v][0] = vusmmlaq_s32(sums[p][v][0], low, pairs[p]);
          sums[p][v][1] = vusmmlaq_s32(sums[p][v][1], high, pairs[p]);
        }
        if constexpr (R % 2 == 1) {
          acc[R - 1][v] = dot(acc[R - 1][v], now, broadcast(rows[R - 1] + a));
          acc[R - 1][v] = dot(acc[R - 1][v], next, broadcast(rows[R - 1] + a + 4));
        }
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        acc[2 * p][v] = (I)vuzp1q_s32(sums[p][v][0], sums[p][v][1]);
        acc[2 * p + 1][v] = (I)vuzp2q_s32(sums[p][v][0], sums[p][v][1]);
      }
    }
    if (left == 0) return;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = dot(acc[r][v], Simd::load_words(b + v * 16), broadcast(rows[r] + a));
      }
    }
  }

 private:
  static int8x8_t load_8(const std::byte* p) {
    return vld1_s8(reinterpret_cast<const std::int8_t*>(p));
  }
  static I broadcast(const std::byte* p) {
    std::int32_t four;
    std::memcpy(&four, p, 4);
    return Simd::set1_words(four);
  }
};

Kernels make_kernels() {
  Kernels table = neon_dotprod_kernels();
  table.name = "neon_i8mm";
  add_int8_kernels<Simd, UsDot>(table);
  return table;
}

}  // namespace

const Kernels& neon_i8mm_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
