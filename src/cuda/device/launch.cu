#include "cuda/device/launch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "cuda/device/context.h"
#include "fusedmoe/error.h"

namespace fusedmoe::cuda {
namespace {

/// What is known of a kernel in a context, one of a device.
struct KernelFacts {
  std::size_t shared_bytes = 0;         // it may use so many
  bool is_sure = true;                  // about that: false where contexts have no numbers
  std::map<std::size_t, int> resident;  // blocks on a multiprocessor, by bytes of shared memory
};

/// Calls function(facts), one call at a time, as threads share a kernel's limit.
template <typename Function>
auto with_facts(const void* kernel, Device device, const Function& function) {
  // Never destroyed: threads may outlive static objects.
  using Key = std::tuple<const void*, int, std::uint64_t>;  // kernel, device, context
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::map<Key, KernelFacts>;
  const std::uint64_t context = current_context_id();
  const std::lock_guard lock(mutex);
  KernelFacts& facts = known[{kernel, device.index, context}];
  facts.is_sure = context != 0;
  return function(facts);
}

/// The limit of a kernel belongs to a context. It is never lowered, as another thread may be about
/// to launch with what was allowed. Where a context may be another than before, it is told at each
/// call.
void allow(const void* kernel, std::size_t bytes, KernelFacts& facts) {
  if (facts.is_sure && bytes <= facts.shared_bytes) return;
  const std::size_t most = std::max(bytes, facts.shared_bytes);
  FUSEDMOE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(most)));
  facts.shared_bytes = most;
}

}  // namespace

void allow_shared_bytes(const void* kernel, std::size_t bytes, Device device) {
  with_facts(kernel, device, [&](KernelFacts& facts) { allow(kernel, bytes, facts); });
}

int resident_blocks(const void* kernel, int threads, std::size_t shared_bytes, Device device) {
  const DeviceLimits& limits = limits_of(device);
  const int per_multiprocessor = with_facts(kernel, device, [&](KernelFacts& facts) {
    int& blocks = facts.resident[shared_bytes];
    if (blocks > 0) return blocks;
    allow(kernel, shared_bytes, facts);
    FUSEDMOE_CUDA_CHECK(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes));
    return blocks;
  });
  // CUDA knows nothing of limits that are pretended.
  constexpr std::int64_t kReserved = 1024;
  const auto bytes = static_cast<std::int64_t>(shared_bytes);
  const std::int64_t fit =
      bytes > limits.block_shared_bytes
          ? 0
          : std::min<std::int64_t>(per_multiprocessor,
                                   limits.multiprocessor_shared_bytes / (bytes + kReserved));
  if (fit == 0) {
    throw Error::internal("a kernel needs " + std::to_string(bytes) +
                          " bytes of shared memory, more than " + to_string(device) + " has");
  }
  return limits.multiprocessors * static_cast<int>(fit);
}

bool may_overlap(const void* kernel, Device device) {
  constexpr int kFirst = 90;
  // Which code runs is the same in all contexts. Each thread asks once, so that none waits.
  thread_local std::map<std::pair<const void*, int>, bool> known;
  const std::pair key(kernel, device.index);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  cudaFuncAttributes attributes{};
  FUSEDMOE_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
  return known.emplace(key, attributes.ptxVersion >= kFirst).first->second;
}

}  // namespace fusedmoe::cuda
