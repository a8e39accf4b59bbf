#include "comm/greeting.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "comm/poll.h"
#include "core/format.h"
#include "fusedmoe/error.h"

namespace fusedmoe::comm {
namespace {

constexpr std::chrono::seconds kPatience{1};
/// At a time. One more, and the first has to go: it has had its chance to speak.
constexpr std::size_t kMostStrangers = 256;

}  // namespace

Socket connect_as(int rank, const Destination& to) {
  Socket socket = connect_to(to);
  Greeting greeting;
  greeting.rank = static_cast<std::uint32_t>(rank);
  greeting.token = to.token.bytes();
  if (!socket.write(&greeting, sizeof greeting)) {
    throw Error::communication(core::format("the connection to rank {} has ended", to.rank));
  }
  return socket;
}

std::optional<Welcome::Guest> Welcome::next(SocketClock::time_point until) {
  do {
    std::vector<pollfd> waits;
    for (const Socket& each : listener_.sockets) waits.push_back({each.get(), POLLIN, 0});
    for (const Stranger& each : strangers_) waits.push_back({each.socket.get(), POLLIN, 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - SocketClock::now());
    const auto step = std::clamp(left, std::chrono::milliseconds(0), kPollInterval);
    ::poll(waits.data(), waits.size(), static_cast<int>(step.count()));
    for (std::size_t i = 0; i < listener_.sockets.size(); ++i) {
      if (waits[i].revents) accept(listener_.sockets[i]);
    }
    for (auto each = strangers_.begin(); each != strangers_.end();) {
      if (!listen_to(*each)) {
        each = strangers_.erase(each);
        continue;
      }
      if (each->got == sizeof(Greeting)) {
        Greeting greeting;
        std::memcpy(&greeting, each->bytes.data(), sizeof greeting);
        Guest guest{greeting.rank, std::move(each->socket)};
        strangers_.erase(each);
        return guest;
      }
      ++each;
    }
  } while (SocketClock::now() < until);
  return std::nullopt;
}

void Welcome::accept(const Socket& listener) {
  Socket socket = accept_from(listener);
  const bool no_descriptor = !socket && (errno == EMFILE || errno == ENFILE);
  const bool full = strangers_.size() >= kMostStrangers || no_descriptor;
  if (full && !strangers_.empty()) strangers_.pop_front();
  if (!socket) return;
  strangers_.emplace_back();
  strangers_.back().socket = std::move(socket);
  strangers_.back().leaves = SocketClock::now() + kPatience;
}

bool Welcome::listen_to(Stranger& stranger) const {
  char* to = stranger.bytes.data() + stranger.got;
  const ssize_t got =
      ::recv(stranger.socket.get(), to, sizeof(Greeting) - stranger.got, MSG_DONTWAIT);
  const bool nothing = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  if (got > 0) stranger.got += static_cast<std::size_t>(got);
  Greeting greeting;
  std::memcpy(&greeting, stranger.bytes.data(), sizeof greeting);
  if (stranger.got >= sizeof greeting.ours && greeting.ours != Greeting::kOurs) return false;
  if (stranger.got == sizeof greeting) return token_.is(greeting.token);
  return (got > 0 || nothing) && SocketClock::now() < stranger.leaves;
}

}  // namespace fusedmoe::comm
