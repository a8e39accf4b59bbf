#include "comm/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace fusedmoe::comm {
namespace {

/// False: the deadline has passed.
bool wait_for(int descriptor, short events, SocketClock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - SocketClock::now());
    const auto step = std::clamp<std::int64_t>(left.count(), 0, 1000);
    pollfd wait{descriptor, events, 0};
    if (::poll(&wait, 1, static_cast<int>(step)) > 0) return true;
    if (left.count() <= 0) return false;
  }
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

Socket::~Socket() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int Socket::release() {
  return std::exchange(descriptor_, -1);
}

void Socket::shut_down() const {
  if (descriptor_ >= 0) ::shutdown(descriptor_, SHUT_RDWR);
}

void Socket::stop_reading() const {
  if (descriptor_ >= 0) ::shutdown(descriptor_, SHUT_RD);
}

bool Socket::read(void* data, std::size_t bytes) const {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(descriptor_, to, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool Socket::read(void* data, std::size_t bytes, SocketClock::time_point deadline) const {
  auto* to = static_cast<char*>(data);
  while (bytes > 0 && wait_to_read(deadline)) {
    const ssize_t got = ::recv(descriptor_, to, bytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) continue;
    if (got <= 0) return false;
    to += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return bytes == 0;
}

bool Socket::wait_to_read(SocketClock::time_point deadline) const {
  return wait_for(descriptor_, POLLIN, deadline);
}

bool Socket::wait_to_write(SocketClock::time_point deadline) const {
  return wait_for(descriptor_, POLLOUT, deadline);
}

void Socket::limit_writes(std::chrono::milliseconds timeout) const {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  const std::chrono::microseconds rest = timeout - seconds;
  const timeval limit{seconds.count(), rest.count()};
  setsockopt(descriptor_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

bool Socket::write(const void* data, std::size_t bytes) const {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(descriptor_, from, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    from += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return true;
}

}  // namespace fusedmoe::comm
