// The words of cuda/peers/protocol.h on the host.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace fusedmoe::cuda {

struct HostWords {
  static std::uint32_t load(const std::uint32_t* p) {
    return of(p).load(std::memory_order_relaxed);
  }
  static void store(std::uint32_t* p, std::uint32_t word) {
    of(p).store(word, std::memory_order_relaxed);
  }
  static std::uint64_t load_acquire(const std::uint64_t* p) {
    return of(p).load(std::memory_order_acquire);
  }
  static void store_release(std::uint64_t* p, std::uint64_t word) {
    of(p).store(word, std::memory_order_release);
  }
  static std::uint32_t set_bits(std::uint32_t* p, std::uint32_t bits) {
    return of(p).fetch_or(bits, std::memory_order_acq_rel);
  }
  static void pause() { std::this_thread::yield(); }

 private:
  template <typename Word>
  static std::atomic_ref<Word> of(const Word* p) {
    return std::atomic_ref<Word>(const_cast<Word&>(*p));
  }
};

}  // namespace fusedmoe::cuda
