// What goes between two ranks in an exchange, and the pieces in which MPI moves it.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>

#include "fusedmoe/comm.h"

namespace fusedmoe::mpi {

/// A message of MPI's. The first of a flow begins with the bytes of the whole flow.
struct Piece {
  /// Some are in a core's cache at once. Each costs a round trip between the ranks.
  static constexpr std::size_t kMost = std::size_t{384} << 10;
  std::shared_ptr<char[]> memory;
  MPI_Request request = MPI_REQUEST_NULL;
  std::size_t bytes = 0;
};

/// All that goes to a peer, or comes from it: one stream of bytes.
struct Flow {
  int peer;
  bool receive;
  std::size_t window;  // pieces that MPI has at a time
  std::span<const Message> messages;
  std::uint64_t bytes = 0;          // of all messages
  std::uint64_t begun = 0;          // bytes in pieces that were begun, the header with them
  std::uint64_t copied = 0;         // those that were copied from or to messages
  std::size_t message = 0, at = 0;  // where the next byte lies
  std::deque<Piece> pieces{};       // that MPI has, the first in front

  std::uint64_t all_bytes() const { return sizeof bytes + bytes; }
  bool done() const { return pieces.empty() && begun == all_bytes(); }
  /// Calls copy(memory, bytes) for the next bytes of the messages.
  template <typename Copy>
  void advance(std::size_t count, const Copy& copy) {
    while (count > 0) {
      const Message& current = messages[message];
      const std::size_t part = std::min(count, current.bytes - at);
      if (part > 0) copy(static_cast<char*>(current.data) + at, part);
      count -= part;
      at += part;
      if (at < current.bytes) continue;
      ++message;
      at = 0;
    }
  }
};

}  // namespace fusedmoe::mpi
