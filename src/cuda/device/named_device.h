// What a compute capability stands for where no device is asked: the limits of a GPU that has it.
#pragma once

#include <cstdint>

namespace fusedmoe::cuda {

/// Of a device.
struct DeviceLimits {
  int multiprocessors = 0;
  std::int64_t block_shared_bytes = 0;           ///< of shared memory that a block can have
  std::int64_t multiprocessor_shared_bytes = 0;  ///< of all blocks; each takes 1 KiB more
};

struct NamedDevice {
  int capability;  ///< major * 10 + minor
  const char* gpu;
  DeviceLimits limits;
};

/// The vendor's figures. Of a capability that is not in the list those of the one before it.
constexpr DeviceLimits limits_of_capability(int capability) {
  constexpr std::int64_t kKiB = 1024;
  constexpr NamedDevice kAll[] = {
      {80, "A100", {108, 163 * kKiB, 164 * kKiB}},
      {86, "RTX 3090", {82, 99 * kKiB, 100 * kKiB}},
      {87, "Orin", {16, 163 * kKiB, 164 * kKiB}},
      {89, "L40S", {142, 99 * kKiB, 100 * kKiB}},
      {90, "H200", {132, 227 * kKiB, 228 * kKiB}},
      {100, "B200", {148, 227 * kKiB, 228 * kKiB}},
      {103, "B300", {148, 227 * kKiB, 228 * kKiB}},
      {110, "Thor", {20, 227 * kKiB, 228 * kKiB}},
      {120, "RTX PRO 6000", {188, 99 * kKiB, 100 * kKiB}},
      {121, "GB10", {48, 99 * kKiB, 100 * kKiB}},
  };
  DeviceLimits found = kAll[0].limits;
  for (const NamedDevice& named : kAll) {
    if (named.capability <= capability) found = named.limits;
  }
  return found;
}

}  // namespace fusedmoe::cuda
