// Memory in which experts arrive that move.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "fusedmoe/tensor.h"

namespace fusedmoe::layer {

/// Blocks of one device, which are taken and freed without a wait for it. Those that nobody uses
/// are kept for the next move, of whichever layer: a commit that freed them would take longer, and
/// the next forward waits for it.
class Staging : public std::enable_shared_from_this<Staging> {
 public:
  /// That of all layers of this process on the device. It goes with the last of them.
  static std::shared_ptr<Staging> of(Device device);

  /// At least so many bytes, (n) u8, which come back here when their last owner goes. Frees what
  /// is kept where nothing of it is large enough. From any thread.
  Tensor take(std::int64_t bytes);

 private:
  explicit Staging(Device device) : device_(device) {}
  Tensor take_kept(std::int64_t bytes);
  void give_back(const Tensor& block) noexcept;

  const Device device_;
  std::mutex mutex_;
  std::vector<Tensor> kept_;
};

}  // namespace fusedmoe::layer
