// Cutting one block of scratch memory into aligned parts, the same way when sizes are computed and
// when memory is handed out.
#pragma once

#include <cstddef>
#include <cstdint>

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
  /// Bytes taken so far, each part rounded up.
  std::size_t used() const { return used_; }

 private:
  char* block_;
  std::size_t used_ = 0;
};

}  // namespace fusedmoe::core
