// wgmma with fp32 accumulators, and wgmma's shared-memory operand. The instructions
// are CuTe's atoms; this picks the one of an element type and width and spreads the accumulator
// array.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // every width, not only the usual ones

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <type_traits>
#include <utility>

namespace fusedmoe::cuda::sm90 {

/// The atoms of width kN: `SharedA` with both operands in shared memory; `RegisterA` with the
/// 64-row operand in registers.
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
    using RegisterA = cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_RS<cute::SM90::GMMA::Major::K,  \
                                                                     cute::SM90::GMMA::Major::K>; \
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

#define FUSEDMOE_WGMMA_ATOM(N)                                               \
  template <>                                                                \
  struct WgmmaAtom<__nv_fp8_e4m3, N> {                                       \
    using SharedA = cute::SM90::GMMA::MMA_64x##N##x32_F32E4M3E4M3_SS_TN<>;   \
    using RegisterA = cute::SM90::GMMA::MMA_64x##N##x32_F32E4M3E4M3_RS_TN<>; \
  };
FUSEDMOE_WGMMA_ATOM(8)
FUSEDMOE_WGMMA_ATOM(16)
FUSEDMOE_WGMMA_ATOM(32)
FUSEDMOE_WGMMA_ATOM(48)
FUSEDMOE_WGMMA_ATOM(64)
FUSEDMOE_WGMMA_ATOM(80)
FUSEDMOE_WGMMA_ATOM(96)
FUSEDMOE_WGMMA_ATOM(128)
FUSEDMOE_WGMMA_ATOM(160)
FUSEDMOE_WGMMA_ATOM(192)
#undef FUSEDMOE_WGMMA_ATOM

/// Descriptor of a K-major operand in the 128-byte swizzle: rows of 128 bytes, 8 rows to 1 KiB, and
/// kPitch bytes to the next 8. Only its low half varies; arithmetic on that alone is half the
/// instructions.
template <int kPitch = 1024>
class Descriptor {
 public:
  __device__ explicit Descriptor(std::uint32_t shared_address)
      : low_((shared_address >> 4 & 0x3fff) | kLeadingOffset) {}
  /// The next 32 bytes of K, what one instruction takes, `steps` times.
  __device__ std::uint64_t at(int steps) const {
    return static_cast<std::uint64_t>(kHigh) << 32 | (low_ + steps * (32 >> 4));
  }

 private:
  static constexpr std::uint32_t kLeadingOffset = 1 << 16;  // unused with a swizzle, but 1
  static constexpr std::uint32_t kHigh =
      (kPitch >> 4) | static_cast<std::uint32_t>(cute::SM90::GMMA::LayoutType::B128) << 30;
  std::uint32_t low_;
};

/// Calls function(accumulators, first column, width) for the one or two instructions of a width.
/// The first one ends at the same column whatever the width, else ptxas inserts register moves.
inline constexpr int kFirstColumns = 144;
template <int kN, int kCount, typename Function>
__device__ inline void for_instructions(float (&accumulators)[kCount], const Function& function) {
  static_assert(kN / 2 <= kCount && kN <= 2 * kFirstColumns);
  constexpr int kFirst = kN < kFirstColumns ? kN : kFirstColumns;
  function(accumulators, 0, std::integral_constant<int, kFirst>());
  if constexpr (kN > kFirst) {
    function(accumulators + kFirst / 2, kFirst, std::integral_constant<int, kN - kFirst>());
  }
}

/// accumulators += A (64 rows) B (kN columns) of one instruction's K, in the first kN / 2. A and B
/// are descriptors, in the second form A is in registers.
template <typename Element, int kN, int kCount>
__device__ inline void multiply(std::uint64_t a, std::uint64_t b, float (&accumulators)[kCount]) {
  for_instructions<kN>(accumulators, [&](float* of_columns, int first, auto width) {
    [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
      WgmmaAtom<Element, width>::SharedA::fma(a, b + (first * 128 >> 4), of_columns[kIndex]...);
    }
    (std::make_index_sequence<width / 2>());
  });
}
template <typename Element, int kN, int kCount>
__device__ inline void multiply(const std::uint32_t (&a)[4], std::uint64_t b,
                                float (&accumulators)[kCount]) {
  for_instructions<kN>(accumulators, [&](float* of_columns, int first, auto width) {
    [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
      WgmmaAtom<Element, width>::RegisterA::fma(a[0], a[1], a[2], a[3], b + (first * 128 >> 4),
                                                of_columns[kIndex]...);
    }
    (std::make_index_sequence<width / 2>());
  });
}

/// sums = A B of one instruction, or += unless `first`; of up to 144 columns.
template <typename Element, int kN, int kCount>
__device__ inline void multiply_apart(std::uint64_t a, std::uint64_t b, bool first,
                                      float (&sums)[kCount]) {
  using cute::SM90::GMMA::ScaleOut;
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    WgmmaAtom<Element, kN>::SharedA::fma(a, b, sums[kIndex]...,
                                         first ? ScaleOut::Zero : ScaleOut::One);
  }
  (std::make_index_sequence<kN / 2>());
}

template <typename Element, int kN, int kCount>
__device__ inline void multiply_apart(const std::uint32_t (&a)[4], std::uint64_t b, bool first,
                                      float (&sums)[kCount]) {
  using cute::SM90::GMMA::ScaleOut;
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    WgmmaAtom<Element, kN>::RegisterA::fma(a[0], a[1], a[2], a[3], b, sums[kIndex]...,
                                           first ? ScaleOut::Zero : ScaleOut::One);
  }
  (std::make_index_sequence<kN / 2>());
}

/// Keeps the compiler from moving reads or writes of the accumulators across.
template <int kCount>
__device__ inline void fence_accumulators(float (&accumulators)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}

}  // namespace fusedmoe::cuda::sm90
