// wgmma m64nNk16 on bf16 with fp32 sums, and its shared-memory operand. The instructions are
// CuTe's atoms; this picks the one of a width and spreads the accumulator array.
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/util.hpp>
#include <utility>

namespace fusedmoe::cuda {

/// The atoms of width kN: `SharedA` with both operands in shared memory, `RegisterA` with the
/// 64-row operand in registers.
template <int kN>
struct WgmmaAtom;

#define FUSEDMOE_WGMMA_ATOM(N)                                                                    \
  template <>                                                                                     \
  struct WgmmaAtom<N> {                                                                           \
    using SharedA = cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K,  \
                                                                     cute::SM90::GMMA::Major::K>; \
    using RegisterA =                                                                             \
        cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K,              \
                                                         cute::SM90::GMMA::Major::K>;             \
  };
FUSEDMOE_WGMMA_ATOM(8)
FUSEDMOE_WGMMA_ATOM(16)
FUSEDMOE_WGMMA_ATOM(32)
FUSEDMOE_WGMMA_ATOM(64)
FUSEDMOE_WGMMA_ATOM(96)
FUSEDMOE_WGMMA_ATOM(128)
FUSEDMOE_WGMMA_ATOM(192)
FUSEDMOE_WGMMA_ATOM(256)
#undef FUSEDMOE_WGMMA_ATOM

/// Descriptor of a K-major operand in the 128-byte swizzle: rows of 128 bytes, 8 rows to 1 KiB.
/// 16 of K further on is kDescriptorK16 more.
__device__ inline std::uint64_t make_descriptor(const void* shared) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ =
      static_cast<std::uint16_t>(cute::cast_smem_ptr_to_uint(shared) >> 4);
  descriptor.bitfield.leading_byte_offset_ = 1;
  descriptor.bitfield.stride_byte_offset_ = 1024 >> 4;
  descriptor.bitfield.base_offset_ = 0;
  descriptor.bitfield.layout_type_ = static_cast<std::uint8_t>(cute::SM90::GMMA::LayoutType::B128);
  return descriptor.desc_;
}
inline constexpr std::uint64_t kDescriptorK16 = 32 >> 4;

/// sums += A (64, 16) B (16, kN).
template <int kN>
__device__ inline void multiply(std::uint64_t a, std::uint64_t b, float (&sums)[kN / 2]) {
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    WgmmaAtom<kN>::SharedA::fma(a, b, sums[kIndex]...);
  }
  (std::make_index_sequence<kN / 2>());
}
template <int kN>
__device__ inline void multiply(const std::uint32_t (&a)[4], std::uint64_t b,
                                float (&sums)[kN / 2]) {
  [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
    WgmmaAtom<kN>::RegisterA::fma(a[0], a[1], a[2], a[3], b, sums[kIndex]...);
  }
  (std::make_index_sequence<kN / 2>());
}

/// Keeps the compiler from moving reads or writes of the sums across.
template <int kCount>
__device__ inline void fence_sums(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace fusedmoe::cuda
