// How long the L2 should keep what is copied, and bulk copies that say so: CuTe's do not.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/util.hpp>

namespace fusedmoe::cuda::sm90 {

inline constexpr auto kEvictNormal =
    static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
inline constexpr auto kEvictFirst =
    static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
inline constexpr auto kEvictLast = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);

/// `bytes`, a multiple of 16, from global to shared memory, both aligned to 16; completes on
/// `full`.
__device__ inline void bulk_copy(void* target, const void* source, int bytes, std::uint64_t* full,
                                 std::uint64_t hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(cute::cast_smem_ptr_to_uint(target)),
      "l"(source), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(full)), "l"(hint)
      : "memory");
}

}  // namespace fusedmoe::cuda::sm90
