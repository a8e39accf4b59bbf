// TCP sockets with deadlines, for the control plane and the data plane over TCP.
#pragma once

#include <chrono>
#include <cstddef>

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
  /// Waits until it can be written, which a connection that is being made then can.
  bool wait_to_write(SocketClock::time_point deadline) const;
  /// False also when the peer has taken nothing for the time of limit_writes().
  bool write(const void* data, std::size_t bytes) const;
  void limit_writes(std::chrono::milliseconds timeout) const;

 private:
  int descriptor_ = -1;
};

}  // namespace fusedmoe::comm
