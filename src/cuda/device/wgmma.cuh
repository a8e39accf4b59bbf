// wgmma m64nNk16 on bf16 or f16 with fp32 sums, and its shared-memory operand. The instructions are
// CuTe's atoms; this picks the one of a width and spreads the accumulator array.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // every width, not only the usual ones

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <type_traits>
#include <utility>

namespace fusedmoe::cuda {

/// The atoms of width kN: `SharedA` with both operands in shared memory; `RegisterA` with the
/// 64-row operand, of bf16, in registers.
template <typename Element, int kN>
struct WgmmaAtom;

#define FUSEDMOE_WGMMA_ATOM(N)                                                                    \
  template <>                                                                                     \
  struct WgmmaAtom<__nv_bfloat16, N> {                                                            \
    using SharedA = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K,  \
                                                                     cute::SM90::GMMA::Major::K>; \
    using RegisterA =                                                                             \
        cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K,              \
                                                         cute::SM90::GMMA::Major::K>;             \
  };                                                                                              \
  template <>                                                                                     \
  struct WgmmaAtom<__half, N> {                                                                   \
    using SharedA = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_SS<cute::SM90::GMMA::Major::K,    \
                                                                   cute::SM90::GMMA::Major::K>;   \
  };
FUSEDMOE_WGMMA_ATOM(8)
FUSEDMOE_WGMMA_ATOM(16)
FUSEDMOE_WGMMA_ATOM(32)
FUSEDMOE_WGMMA_ATOM(48)
FUSEDMOE_WGMMA_ATOM(64)
FUSEDMOE_WGMMA_ATOM(80)
FUSEDMOE_WGMMA_ATOM(96)
FUSEDMOE_WGMMA_ATOM(112)
FUSEDMOE_WGMMA_ATOM(128)
FUSEDMOE_WGMMA_ATOM(144)
#undef FUSEDMOE_WGMMA_ATOM

/// Descriptor of a K-major operand in the 128-byte swizzle: rows of 128 bytes, 8 rows to 1 KiB, and
/// kPitch bytes to the next 8. Only its low half varies; arithmetic on that alone is half the
/// instructions.
template <int kPitch = 1024>
class Descriptor {
 public:
  __device__ explicit Descriptor(std::uint32_t shared_address)
      : low_((shared_address >> 4 & 0x3fff) | kLeadingOffset) {}
  /// The next 16 columns of K, `steps` times.
  __device__ std::uint64_t at(int steps) const {
    return static_cast<std::uint64_t>(kHigh) << 32 | (low_ + steps * (32 >> 4));
  }

 private:
  static constexpr std::uint32_t kLeadingOffset = 1 << 16;  // unused with a swizzle, but 1
  static constexpr std::uint32_t kHigh =
      (kPitch >> 4) | static_cast<std::uint32_t>(cute::SM90::GMMA::LayoutType::B128) << 30;
  std::uint32_t low_;
};

/// Calls function(sums, first column, width) for the one or two instructions of a width. The first
/// takes the same columns whatever the width: instructions of which one has sums of two others
/// would have them moved around.
inline constexpr int kFirstColumns = 144;
template <int kN, int kSums, typename Function>
__device__ inline void for_instructions(float (&sums)[kSums], const Function& function) {
  static_assert(kN / 2 <= kSums && kN <= 2 * kFirstColumns);
  constexpr int kFirst = kN < kFirstColumns ? kN : kFirstColumns;
  function(sums, 0, std::integral_constant<int, kFirst>());
  if constexpr (kN > kFirst) {
    function(sums + kFirst / 2, kFirst, std::integral_constant<int, kN - kFirst>());
  }
}

/// sums += A (64, 16) B (16, kN), in the first kN / 2 sums.
template <typename Element, int kN, int kSums>
__device__ inline void multiply(std::uint64_t a, std::uint64_t b, float (&sums)[kSums]) {
  for_instructions<kN>(sums, [&](float* of_columns, int first, auto width) {
    [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
      WgmmaAtom<Element, width>::SharedA::fma(a, b + (first * 128 >> 4), of_columns[kIndex]...);
    }
    (std::make_index_sequence<width / 2>());
  });
}
template <int kN, int kSums>
__device__ inline void multiply(const std::uint32_t (&a)[4], std::uint64_t b,
                                float (&sums)[kSums]) {
  for_instructions<kN>(sums, [&](float* of_columns, int first, auto width) {
    [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
      WgmmaAtom<__nv_bfloat16, width>::RegisterA::fma(
          a[0], a[1], a[2], a[3], b + (first * 128 >> 4), of_columns[kIndex]...);
    }
    (std::make_index_sequence<width / 2>());
  });
}

/// sums += A (16, 32) B (32, 8) of one warp, as two instructions have them: `a` as wgmma's register
/// operand, `b` the lane's row of four 8 x 8 matrices.
__device__ inline void multiply_8(const std::uint32_t (&a)[2][4], const std::uint8_t* b,
                                  float* sums) {
  std::uint32_t k[4];
  cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(b), k[0], k[1], k[2],
                                k[3]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(sums[0], sums[1], sums[2], sums[3], a[i][0], a[i][1],
                                              a[i][2], a[i][3], k[2 * i], k[2 * i + 1], sums[0],
                                              sums[1], sums[2], sums[3]);
  }
}

/// Keeps the compiler from moving reads or writes of the sums across.
template <int kCount>
__device__ inline void fence_sums(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace fusedmoe::cuda
