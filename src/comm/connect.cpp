#include "comm/connect.h"

#include <fcntl.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <thread>

#include "comm/address.h"
#include "comm/place.h"
#include "comm/poll.h"
#include "core/format.h"
#include "fusedmoe/error.h"

namespace fusedmoe::comm {
namespace {

/// How long a name or a port that is not there yet is left alone between two tries.
constexpr std::chrono::milliseconds kRetry{50};

/// All addresses of this host.
std::vector<Address> everywhere(int port) {
  std::vector<Address> both;
  for (const char* any : {"::", "0.0.0.0"}) {
    const Addresses found = addresses_of(any, port);
    both.insert(both.end(), found.all.begin(), found.all.end());
  }
  return both;
}

/// Listens at one address. Returns the problem, 0 for none.
int listen_on(const Address& address, Socket& socket) {
  socket = Socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return errno;
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.family() == AF_INET6) {
    setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  }
  const bool listens =
      ::bind(socket.get(), address.get(), address.bytes) == 0 && ::listen(socket.get(), 1024) == 0;
  return listens ? 0 : errno;
}

/// Listens at those of the addresses that this host has, all at one port. Returns the problem, 0
/// for none.
int listen_on_all(const std::vector<Address>& addresses, Listener& listener) {
  int code = EADDRNOTAVAIL;
  for (Address address : addresses) {
    if (listener.port > 0) address.set_port(listener.port);
    Socket socket;
    const int problem = listen_on(address, socket);
    if (problem == 0) {
      getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address.place), &address.bytes);
      listener.port = address.port();
      listener.sockets.push_back(std::move(socket));
    } else if (code == EADDRNOTAVAIL) {
      code = problem;
    }
    // Another process has the port at this address. A port that the system chose can be another.
    if (problem == EADDRINUSE) return problem;
  }
  return listener.sockets.empty() ? code : 0;
}

Listener listen(const std::vector<Address>& addresses, const std::string& place) {
  constexpr int kTries = 10;
  int code = 0;
  for (int i = 0; i < kTries; ++i) {
    Listener listener;
    code = listen_on_all(addresses, listener);
    if (code == 0) return listener;
    const bool chosen = !addresses.empty() && addresses.front().port() > 0;
    if (chosen || code != EADDRINUSE) break;
  }
  throw Error::communication(core::format(
      "cannot listen at {}: {}", place,
      code == EADDRNOTAVAIL ? "this host does not have that address" : std::strerror(code)));
}

/// A peer that does not answer is given up at the deadline, or where meanwhile() throws. Returns
/// the problem, 0 for none.
int connect_until(const Socket& socket, const Address& to, SocketClock::time_point deadline,
                  const std::function<void()>& meanwhile) {
  const int descriptor = socket.get();
  if (::connect(descriptor, to.get(), to.bytes) != 0 && errno != EINPROGRESS) return errno;
  while (!socket.wait_to_write(std::min(deadline, SocketClock::now() + kPollInterval))) {
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

Listener listen_at(const std::string& host, int port, bool has_token,
                   SocketClock::time_point deadline) {
  const std::string place = core::format("{}:{}", host, port);
  Addresses found = addresses_of(host, port);
  while (found.all.empty()) {
    if (SocketClock::now() >= deadline) {
      throw Error::communication(core::format("cannot listen at {}: {}", place, found.problem));
    }
    call_wait_hook();
    std::this_thread::sleep_for(kRetry);
    found = addresses_of(host, port);
  }
  check_guarded(has_token, host, found.all);
  const bool is_name = host.find(':') == std::string::npos &&
                       host.find_first_not_of("0123456789.") != std::string::npos;
  const bool of_network = is_name && host != "localhost";
  if (has_token && of_network && all_loopback(found.all)) found.all = everywhere(port);
  return listen(found.all, place);
}

Listener listen_on_loopback() {
  return listen(addresses_of("127.0.0.1", 0).all, "127.0.0.1");
}

Listener listen_for_all_hosts() {
  std::vector<Address> own = addresses_of(host_name(), 0).all;
  std::erase_if(own, [](const Address& each) { return each.is_loopback(); });
  Listener listener;
  if (!own.empty() && listen_on_all(own, listener) == 0) return listener;
  return listen(everywhere(0), "all addresses");
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
