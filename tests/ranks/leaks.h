// What a process holds that repeated failures could leak: descriptors, threads, memory.
#pragma once

#include <gtest/gtest.h>
#include <malloc.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <iterator>
#include <thread>

namespace fusedmoe::testing {

inline std::int64_t entries_of(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

/// Bytes of the heap that are in use; 0 under sanitizers, which have a heap of their own and look
/// for leaks themselves.
inline std::size_t heap_in_use() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return 0;
#else
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
#endif
}

/// Calls round(i) for i < rounds. What the process holds after all of them is what it held after
/// the first twenty, when everything that is made once was there. `device_bytes`: of a GPU, in use.
inline void expect_no_leaks(
    const std::function<void(int)>& round, int rounds = 100,
    const std::function<std::size_t()>& device_bytes = [] { return std::size_t{0}; }) {
  constexpr int kFirst = 20;
  constexpr std::size_t kNoise = 128 << 10;  // of the allocator; a layer in each round is 4 MiB
  constexpr std::size_t kDeviceNoise = 32
                                       << 20;  // pages have 2 MiB: one in each of 20 rounds is more
  for (int i = 0; i < kFirst; ++i) round(i);
  const std::int64_t descriptors = entries_of("/proc/self/fd"),
                     threads = entries_of("/proc/self/task");
  const std::size_t heap = heap_in_use(), on_device = device_bytes();
  for (int i = kFirst; i < rounds; ++i) round(i);
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  EXPECT_LE(heap_in_use(), heap + kNoise);
  EXPECT_LE(device_bytes(), on_device + kDeviceNoise);
  // A thread that was joined may be listed a little longer.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (entries_of("/proc/self/task") > threads && std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  EXPECT_LE(entries_of("/proc/self/task"), threads);
}

}  // namespace fusedmoe::testing
