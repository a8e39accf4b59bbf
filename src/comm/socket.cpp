#include "comm/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/address.h"
#include "comm/poll.h"
#include "core/format.h"
#include "fusedmoe/error.h"

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

/// A peer that does not answer is given up at the deadline, or where meanwhile() throws. Returns
/// the problem, 0 for none.
int connect_until(const Socket& socket, const Address& to, SocketClock::time_point deadline,
                  const std::function<void()>& meanwhile) {
  const int descriptor = socket.get();
  if (::connect(descriptor, to.get(), to.bytes) != 0 && errno != EINPROGRESS) return errno;
  while (!wait_for(descriptor, POLLOUT, std::min(deadline, SocketClock::now() + kPollInterval))) {
    if (SocketClock::now() >= deadline) return ETIMEDOUT;
    meanwhile();
  }
  int code = 0;
  socklen_t size = sizeof code;
  getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &code, &size);
  if (code == 0) ::fcntl(descriptor, F_SETFL, 0);  // blocks from here on
  return code;
}

/// Small messages leave at once.
void set_no_delay(int descriptor) {
  const int on = 1;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
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

Socket accept_from(const Socket& listener) {
  Socket connection(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (connection) set_no_delay(connection.get());
  return connection;
}

Socket connect_to(const Destination& to) {
  std::string problem = std::strerror(ETIMEDOUT);
  const auto meanwhile = [&] {
    to.meanwhile();
    call_wait_hook();
  };
  do {
    const Addresses found = addresses_of(to.address, to.port);
    if (!found.problem.empty()) problem = found.problem;
    check_guarded(!to.token.empty(), to.address, found.all);
    auto left = static_cast<std::ptrdiff_t>(found.all.size());
    for (const Address& each : found.all) {
      Socket connection(::socket(each.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      // One that does not answer leaves the others their share of the time.
      const auto now = SocketClock::now();
      const auto share = std::max(to.deadline - now, SocketClock::duration()) / left--;
      const int code = connection ? connect_until(connection, each, now + share, meanwhile) : errno;
      if (code == 0) {
        set_no_delay(connection.get());
        return connection;
      }
      problem = std::strerror(code);
    }
    meanwhile();
    std::this_thread::sleep_for(kRetry);
  } while (SocketClock::now() < to.deadline);
  throw Error::communication(
      core::format("cannot reach rank {} at {}:{}: {}", to.rank, to.address, to.port, problem));
}

std::pair<int, Token> port_and_token(int rank, std::string_view text) {
  const std::size_t blank = std::min(text.find(' '), text.size());
  const std::string_view number = text.substr(0, blank);
  int port = 0;
  const char* end = number.data() + number.size();
  const auto [stop, problem] = std::from_chars(number.data(), end, port);
  if (problem != std::errc() || stop != end || port <= 0 || port > 65535) {
    throw Error::communication(
        core::format("rank {} has told \"{}\" as its port; must be in [1, 65535]", rank, number));
  }
  const std::string_view token = text.substr(std::min(blank + 1, text.size()));
  return {port, Token(token, core::format("token of rank {}", rank))};
}

}  // namespace fusedmoe::comm
