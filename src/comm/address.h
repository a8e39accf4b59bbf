// Where hosts are.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <vector>

namespace fusedmoe::comm {

/// Of IPv4 or IPv6, with a port.
struct Address {
  sockaddr_storage place{};
  socklen_t bytes = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&place); }
  int family() const { return place.ss_family; }
  /// Reached from this host alone.
  bool is_loopback() const;
  int port() const;
  void set_port(int port);
};

/// The addresses that a name has now, or why there are none.
struct Addresses {
  std::vector<Address> all;
  std::string problem;
};
/// `host`: a name, or an address of IPv4 or IPv6, also in brackets.
Addresses addresses_of(const std::string& host, int port);

/// Whether all are reached from this host alone.
bool all_loopback(const std::vector<Address>& addresses);
/// Throws Error where ranks of other hosts can reach one of these and no token keeps others out.
void check_guarded(bool has_token, const std::string& host, const std::vector<Address>& addresses);

}  // namespace fusedmoe::comm
