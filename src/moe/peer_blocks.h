// A block of GPU memory of each rank of a host, which all ranks map. Kernels of all ranks take
// steps in one (moe/peer_memory.h); experts that move lie in one for the copy engines of others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// The ranks that map each other's memory, as one of them sees them.
struct PeerGroup {
  Device device;  ///< of this rank
  int rank = 0, size = 1;
  std::vector<int> names;  ///< of the ranks, in errors
};

/// The blocks of all ranks, as one rank has mapped them. Whoever destroys this object first waits
/// until this rank's GPU reads and writes none of them any more. A block is freed when no rank maps
/// it.
class PeerBlocks {
 public:
  /// At the beginning of each block: its mark, and what who uses the block may have there.
  static constexpr std::size_t kHeadBytes = 256;

  /// With this rank's block: of at least so many bytes, zeros behind the mark. Throws Error where
  /// its GPU cannot lend it.
  static std::shared_ptr<PeerBlocks> make(const PeerGroup& group, std::size_t bytes);

  virtual ~PeerBlocks() = default;
  /// Of this rank's block, with its head.
  virtual std::size_t bytes() const = 0;
  /// Of a rank's block, as this rank maps it; null: not yet.
  virtual std::byte* begin(int rank) const = 0;

  // Set-up, by all ranks at the same time.
  /// A number that no other block of the host has.
  virtual std::uint64_t mark() const = 0;
  /// Maps the block with this mark as that of the rank, if it is one of this process; else false.
  /// No kernel may use that block meanwhile.
  virtual bool map(int rank, std::uint64_t mark) = 0;
  /// A file descriptor of this rank's block for another process; the caller closes it.
  virtual int descriptor() const = 0;
  /// Maps the block with this mark, of so many bytes, of which another process has made a
  /// descriptor.
  virtual void map_descriptor(int rank, std::uint64_t mark, int descriptor, std::size_t bytes) = 0;
  /// Reads the mark of every block with a kernel. Throws Error where it finds another one.
  virtual void check_marks() = 0;
};

}  // namespace fusedmoe
