// Cutting one block of scratch memory into aligned parts, the same way when sizes are computed and
// when memory is handed out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fusedmoe/tensor.h"

namespace fusedmoe::core {

/// Every part of a workspace starts at a multiple of this many bytes from its beginning.
inline constexpr std::size_t kWorkspaceGranularity = 256;

constexpr std::size_t round_up_workspace(std::size_t bytes) {
  return (bytes + kWorkspaceGranularity - 1) / kWorkspaceGranularity * kWorkspaceGranularity;
}

/// Hands out consecutive parts of a block. With a null block it only counts.
class WorkspaceCutter {
 public:
  explicit WorkspaceCutter(void* block) : block_(static_cast<char*>(block)) {}

  void* take(std::size_t bytes) {
    void* part = block_ ? block_ + used_ : nullptr;
    used_ += round_up_workspace(bytes);
    return part;
  }
  /// The same as a contiguous tensor; undefined where elements are only counted.
  TensorView take(DType dtype, const Shape& shape, Device device) {
    const std::int64_t elements = shape.numel();
    void* data = take(static_cast<std::size_t>(bytes(dtype, elements)));
    return data || elements == 0 ? TensorView(data, dtype, shape, device) : TensorView();
  }
  /// Bytes taken so far, each part rounded up.
  std::size_t used() const { return used_; }

 private:
  char* block_;
  std::size_t used_ = 0;
};

}  // namespace fusedmoe::core
