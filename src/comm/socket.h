// TCP sockets with deadlines, for the control plane and the data plane over TCP. Every failure
// is an Error of kind communication that names the peer.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "comm/token.h"

namespace fusedmoe::comm {

using SocketClock = std::chrono::steady_clock;

/// Owns a file descriptor; -1: none.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }
  int release();
  /// Wakes whoever reads or writes it; they then see its end.
  void shut_down() const;
  /// The same for who reads; it can be written still.
  void stop_reading() const;

  /// False when the peer has closed the connection.
  bool read(void* data, std::size_t bytes) const;
  /// False also when the deadline has passed.
  bool read(void* data, std::size_t bytes, SocketClock::time_point deadline) const;
  /// Waits until there is something to read, or the end; false: the deadline has passed.
  bool wait_to_read(SocketClock::time_point deadline) const;
  /// False also when the peer has taken nothing for the time of limit_writes().
  bool write(const void* data, std::size_t bytes) const;
  void limit_writes(std::chrono::milliseconds timeout) const;

 private:
  int descriptor_ = -1;
};

/// The next connection; none when nobody has connected.
Socket accept_from(const Socket& listener);
/// How long a name or a port that is not there yet is left alone between two tries.
inline constexpr std::chrono::milliseconds kRetry{50};
/// A rank that listens, maybe only later.
struct Destination {
  int rank;
  std::string address;
  int port;
  SocketClock::time_point deadline;
  Token token;  // that this rank wants to be told
  /// Called every few milliseconds; may throw, to give up before the deadline.
  std::function<void()> meanwhile = [] {};
};
/// Tries until the deadline. Throws Error at once for a rank of another host without a token.
Socket connect_to(const Destination& to);

/// What `rank` has told the others: "40213 c0ffee...", where it listens and what it wants to be
/// told. Throws Error where `text` is something else.
std::pair<int, Token> port_and_token(int rank, std::string_view text);

}  // namespace fusedmoe::comm
