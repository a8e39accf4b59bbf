// How a rank that connects to another says who it is. Anybody may connect to a port: who does not
// say within a second that it is one of our ranks is dropped, and holds up nobody meanwhile.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <optional>

#include "comm/connect.h"
#include "comm/socket.h"
#include "comm/token.h"

namespace fusedmoe::comm {

struct Greeting {
  static constexpr std::uint32_t kOurs = 0x666d6f65;
  std::uint32_t ours = kOurs;  // else it is not one
  std::uint32_t rank = 0;
  Token::Bytes token{};  // else it is not one of this job
};

/// Connects and says that this is `rank`.
Socket connect_as(int rank, const Destination& to);

/// Who connects to a listener.
class Welcome {
 public:
  struct Guest {
    std::uint32_t rank;
    Socket socket;
  };

  Welcome(Listener listener, const Token& token) : listener_(std::move(listener)), token_(token) {}
  /// The next that has said its rank and the token; none: nobody until then.
  std::optional<Guest> next(SocketClock::time_point until);

 private:
  /// Has connected, and said nothing yet, or a part.
  struct Stranger {
    Socket socket;
    SocketClock::time_point leaves;
    std::array<char, sizeof(Greeting)> bytes{};
    std::size_t got = 0;
  };
  void accept(const Socket& listener);
  /// Reads what has come; false: forget it.
  bool listen_to(Stranger& stranger) const;

  Listener listener_;
  Token token_;
  std::list<Stranger> strangers_;  // the one that came first in front
};

}  // namespace fusedmoe::comm
