#include "layer/staging.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/device_runtime.h"

namespace fusedmoe::layer {

std::shared_ptr<Staging> Staging::of(Device device) {
  static std::mutex mutex;
  static std::map<std::pair<DeviceKind, int>, std::weak_ptr<Staging>> all;
  const std::lock_guard lock(mutex);
  std::weak_ptr<Staging>& there = all[{device.kind, device.index}];
  std::shared_ptr<Staging> staging = there.lock();
  if (!staging) there = staging = std::shared_ptr<Staging>(new Staging(device));
  return staging;
}

Tensor Staging::take(std::int64_t bytes) {
  Tensor block = take_kept(bytes);
  if (!block) {
    std::shared_ptr<void> memory =
        core::runtime_of(device_).allocate_pages(static_cast<std::size_t>(bytes), device_);
    block = Tensor(TensorView(memory.get(), DType::kU8, {bytes}, device_), memory);
  }
  void* const data = block.data();
  const auto back = [home = weak_from_this(), block](const void*) {
    if (const std::shared_ptr<Staging> staging = home.lock()) staging->give_back(block);
  };
  return Tensor(block, std::shared_ptr<const void>(data, back));
}

/// The smallest that is large enough. Undefined: there is none, and none is kept any more.
Tensor Staging::take_kept(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Tensor found;
  for (Tensor& block : kept_) {
    const bool fits = block.numel() >= bytes;
    if (fits && (!found || block.numel() < found.numel())) found = block;
  }
  std::erase_if(kept_, [&](const Tensor& block) { return !found || block.data() == found.data(); });
  return found;
}

void Staging::give_back(const Tensor& block) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    kept_.push_back(block);
  } catch (const std::bad_alloc&) {
    // Freed then.
  }
}

}  // namespace fusedmoe::layer
