// Limits of a device, and what a compute capability stands for where no device is asked.
#pragma once

#include <cstdint>

namespace fusedmoe::cuda {

/// Of a device.
struct DeviceLimits {
  int multiprocessors = 0;
  std::int64_t block_shared_bytes = 0;           ///< of shared memory that a block can have
  std::int64_t multiprocessor_shared_bytes = 0;  ///< of all blocks; each takes 1 KiB more
};

/// Of a GPU that has a compute capability, as major * 10 + minor: the vendor's figures. Of a
/// capability that is not in the list those of the one before it.
constexpr DeviceLimits limits_of_capability(int capability) {
  struct Named {
    int capability;
    DeviceLimits limits;
  };
  constexpr std::int64_t kKiB = 1024;
  constexpr Named kAll[] = {
      {80, {108, 163 * kKiB, 164 * kKiB}},   // A100
      {86, {82, 99 * kKiB, 100 * kKiB}},     // RTX 3090
      {87, {16, 163 * kKiB, 164 * kKiB}},    // Orin
      {89, {142, 99 * kKiB, 100 * kKiB}},    // L40S
      {90, {132, 227 * kKiB, 228 * kKiB}},   // H200
      {100, {148, 227 * kKiB, 228 * kKiB}},  // B200
      {103, {148, 227 * kKiB, 228 * kKiB}},  // B300
      {110, {20, 227 * kKiB, 228 * kKiB}},   // Thor
      {120, {188, 99 * kKiB, 100 * kKiB}},   // RTX PRO 6000
      {121, {48, 99 * kKiB, 100 * kKiB}},    // GB10
  };
  DeviceLimits found = kAll[0].limits;
  for (const Named& named : kAll) {
    if (named.capability <= capability) found = named.limits;
  }
  return found;
}

}  // namespace fusedmoe::cuda
