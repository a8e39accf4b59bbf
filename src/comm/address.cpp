#include "comm/address.h"

#include <netdb.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "comm/place.h"
#include "comm/poll.h"
#include "comm/token.h"
#include "core/check.h"

namespace fusedmoe::comm {
namespace {

in_port_t& port_of(sockaddr_storage& place) {
  return place.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(place).sin6_port
                                     : reinterpret_cast<sockaddr_in&>(place).sin_port;
}

bool all_loopback(const std::vector<Address>& addresses) {
  return std::all_of(addresses.begin(), addresses.end(),
                     [](const Address& each) { return each.is_loopback(); });
}

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

}  // namespace

bool Address::is_loopback() const {
  if (family() == AF_INET6) {
    const in6_addr& address = reinterpret_cast<const sockaddr_in6&>(place).sin6_addr;
    return IN6_IS_ADDR_LOOPBACK(&address) ||
           (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == IN_LOOPBACKNET);
  }
  const in_addr_t address = reinterpret_cast<const sockaddr_in&>(place).sin_addr.s_addr;
  return ntohl(address) >> 24 == IN_LOOPBACKNET;
}

int Address::port() const {
  return ntohs(port_of(const_cast<sockaddr_storage&>(place)));
}

void Address::set_port(int port) {
  port_of(place) = htons(static_cast<in_port_t>(port));
}

Addresses addresses_of(const std::string& host, int port) {
  const bool brackets = host.starts_with('[') && host.ends_with(']');
  const std::string name = brackets ? host.substr(1, host.size() - 2) : host;
  addrinfo hints{}, *list = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  const int problem = getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (problem != 0) return {{}, gai_strerror(problem)};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  Addresses result;
  for (const addrinfo* each = list; each; each = each->ai_next) {
    if (each->ai_family != AF_INET && each->ai_family != AF_INET6) continue;
    Address& address = result.all.emplace_back();
    std::memcpy(&address.place, each->ai_addr, each->ai_addrlen);
    address.bytes = each->ai_addrlen;
  }
  if (result.all.empty()) result.problem = "it has no address of IPv4 or IPv6";
  return result;
}

void check_guarded(bool has_token, const std::string& host, const std::vector<Address>& addresses) {
  if (has_token || all_loopback(addresses)) return;
  throw Error::invalid(
      kTokenVariable, core::format("{} is not set: other hosts can reach {}, so all ranks need the "
                                   "same secret of {} to {} characters",
                                   kTokenVariable, host, Token::kLeast, Token::kMost));
}

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

}  // namespace fusedmoe::comm
