// The words of cuda/peers/protocol.h in a kernel, for all GPUs of the host and the host itself.
#pragma once

#include <cstdint>

namespace fusedmoe::cuda {

struct DeviceWords {
  static __device__ std::uint32_t load(const std::uint32_t* p) {
    std::uint32_t word;
    asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
    return word;
  }
  static __device__ void store(std::uint32_t* p, std::uint32_t word) {
    asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
  }
  static __device__ std::uint64_t load_acquire(const std::uint64_t* p) {
    std::uint64_t word;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(word) : "l"(p) : "memory");
    return word;
  }
  static __device__ void store_release(std::uint64_t* p, std::uint64_t word) {
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(p), "l"(word) : "memory");
  }
  /// One more; returns what was there. Sees what those wrote who counted before, behind a fence.
  static __device__ std::uint32_t count_acquire(std::uint32_t* p) {
    std::uint32_t before;
    asm volatile("atom.acquire.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
    return before;
  }
  static __device__ std::uint32_t set_bits(std::uint32_t* p, std::uint32_t bits) {
    return atomicOr(p, bits);
  }
  static __device__ std::uint64_t nanoseconds() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }
  static __device__ void pause() {}
};

}  // namespace fusedmoe::cuda
