// How ranks meet over TCP: one listens, the others connect. Every failure is an Error of kind
// communication that names the peer.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/socket.h"
#include "comm/token.h"

namespace fusedmoe::comm {

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

/// The next connection; none when nobody has connected.
Socket accept_from(const Socket& listener);
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
