// Where hosts are, and where a rank listens.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "comm/socket.h"

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

/// Throws Error where ranks of other hosts can reach one of these and no token keeps others out.
void check_guarded(bool has_token, const std::string& host, const std::vector<Address>& addresses);

/// Sockets that take connections at one port.
struct Listener {
  std::vector<Socket> sockets;
  int port = 0;
};
/// Listens at the addresses of `host` that this host has. Tries until the deadline, as a name may
/// not be known yet. Without a token these must be addresses of this host alone. With a token, a
/// name that means only this host here may mean a network elsewhere (Debian gives the own name
/// 127.0.1.1): then it listens at all addresses.
Listener listen_at(const std::string& host, int port, bool has_token,
                   SocketClock::time_point deadline);
/// For processes of this host alone, at a port that the system chooses.
Listener listen_on_loopback();
/// The same for ranks of other hosts, which know this host by its name: at the addresses of that,
/// or at all where none of them is known here.
Listener listen_for_all_hosts();

}  // namespace fusedmoe::comm
