// Memory that the ranks of one host share. Each rank has a file in memory, which all ranks map at
// the same addresses: a rank reads what another has put there without a copy, pointers included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "fusedmoe/comm.h"

namespace fusedmoe::comm {

/// take() and give_back() may be called from any thread; lend() from one at a time, parts of a
/// communicator included.
class SharedMemory {
 public:
  /// One text of every rank.
  using Gather = std::function<std::vector<std::string>(const std::string&)>;
  /// Collective, for ranks that are processes of one host. Null on all ranks if one of them cannot.
  static std::shared_ptr<SharedMemory> make(int rank, int size, const Gather& gather);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// A block of this rank's memory, aligned to a page. Throws Error where there is too little.
  void* take(std::size_t bytes);
  void give_back(const void* block) noexcept;
  /// Whether the address lies in this rank's memory.
  bool contains(const void* address) const;

  /// What a rank lends, and of which kind it is.
  struct Lent {
    std::string kind;
    const void* data;
  };
  using Reader = std::function<void(std::span<const Lent> lent)>;
  /// As DataPlane::lend(), of what lies in this memory.
  void lend(const Lent& mine, std::span<const int> peers, const Reader& read, Waiting& waiting);

 private:
  struct Slot;
  SharedMemory(int rank, int size);
  bool map(const std::vector<std::string>& offers, int chosen);
  std::string offer(bool anywhere) const;
  void unmap() noexcept;
  void grow(std::size_t bytes);
  char* memory_of(int rank) const;
  Slot& slot(int owner, int peer) const;
  template <typename Condition>
  void wait(int peer, Waiting& waiting, const Condition& condition) const;

  struct Block {
    std::size_t begin, end;  // offsets
  };
  const int rank_, size_;
  const int file_;
  std::string mark_;  // at the beginning of the file
  const std::size_t header_bytes_;
  char* base_ = nullptr;                 // of rank 0's memory; the others' follow
  std::size_t file_bytes_ = 0;           // that have pages
  std::vector<std::uint64_t> lendings_;  // with each rank
  std::mutex mutex_;
  std::vector<Block> blocks_;  // taken, in ascending order
};

}  // namespace fusedmoe::comm
