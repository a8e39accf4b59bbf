#include "comm/address.h"

#include <netdb.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "comm/token.h"
#include "core/check.h"

namespace fusedmoe::comm {
namespace {

in_port_t& port_of(sockaddr_storage& place) {
  return place.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(place).sin6_port
                                     : reinterpret_cast<sockaddr_in&>(place).sin_port;
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

bool all_loopback(const std::vector<Address>& addresses) {
  return std::all_of(addresses.begin(), addresses.end(),
                     [](const Address& each) { return each.is_loopback(); });
}

void check_guarded(bool has_token, const std::string& host, const std::vector<Address>& addresses) {
  if (has_token || all_loopback(addresses)) return;
  throw Error::invalid(
      kTokenVariable, core::format("{} is not set: other hosts can reach {}, so all ranks need the "
                                   "same secret of {} to {} characters",
                                   kTokenVariable, host, Token::kLeast, Token::kMost));
}

}  // namespace fusedmoe::comm
