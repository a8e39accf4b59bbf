// Limits of a device, and what a compute capability stands for where no device is asked.
#pragma once

#include <cstdint>

namespace fusedmoe::cuda {

/// Of a device.
struct DeviceLimits {
  int multiprocessors = 0;
  std::int64_t block_shared_bytes = 0;           ///< of shared memory that a block can have
  std::int64_t multiprocessor_shared_bytes = 0;  ///< of all blocks; each takes 1 KiB more
  std::int64_t l2_bytes = 0;
};

/// Of a GPU that has a compute capability, as major * 10 + minor: the vendor's figures. Of a
/// capability that is not in the list those of the one before it.
constexpr DeviceLimits limits_of_capability(int capability) {
  struct Named {
    int capability;
    DeviceLimits limits;
  };
  constexpr std::int64_t kKiB = 1024, kMiB = 1024 * kKiB;
  constexpr Named kAll[] = {
      {80, {108, 163 * kKiB, 164 * kKiB, 40 * kMiB}},    // A100
      {86, {82, 99 * kKiB, 100 * kKiB, 6 * kMiB}},       // RTX 3090
      {87, {16, 163 * kKiB, 164 * kKiB, 4 * kMiB}},      // Orin
      {89, {142, 99 * kKiB, 100 * kKiB, 96 * kMiB}},     // L40S
      {90, {132, 227 * kKiB, 228 * kKiB, 60 * kMiB}},    // H200
      {100, {148, 227 * kKiB, 228 * kKiB, 126 * kMiB}},  // B200
      {103, {148, 227 * kKiB, 228 * kKiB, 126 * kMiB}},  // B300
      {110, {20, 227 * kKiB, 228 * kKiB, 32 * kMiB}},    // Thor
      {120, {188, 99 * kKiB, 100 * kKiB, 128 * kMiB}},   // RTX PRO 6000
      {121, {48, 99 * kKiB, 100 * kKiB, 24 * kMiB}},     // GB10
  };
  DeviceLimits found = kAll[0].limits;
  for (const Named& named : kAll) {
    if (named.capability <= capability) found = named.limits;
  }
  return found;
}

}  // namespace fusedmoe::cuda
