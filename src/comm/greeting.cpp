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

}  // namespace

Socket connect_as(int rank, const Destination& to) {
  Socket socket = connect_to(to);
  Greeting greeting;
  greeting.rank = static_cast<std::uint32_t>(rank);
  if (!socket.write(&greeting, sizeof greeting)) {
    throw Error::communication(core::format("the connection to rank {} has ended", to.rank));
  }
  return socket;
}

std::optional<Welcome::Guest> Welcome::next(SocketClock::time_point until) {
  do {
    std::vector<pollfd> waits{{listener_.get(), POLLIN, 0}};
    for (const Stranger& each : strangers_) waits.push_back({each.socket.get(), POLLIN, 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - SocketClock::now());
    const auto step = std::clamp(left, std::chrono::milliseconds(0), kPollInterval);
    ::poll(waits.data(), waits.size(), static_cast<int>(step.count()));
    if (waits.front().revents) accept();
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

void Welcome::accept() {
  Socket socket = accept_from(listener_);
  if (!socket) return;
  strangers_.emplace_back();
  strangers_.back().socket = std::move(socket);
  strangers_.back().leaves = SocketClock::now() + kPatience;
}

bool Welcome::listen_to(Stranger& stranger) {
  char* to = stranger.bytes.data() + stranger.got;
  const ssize_t got =
      ::recv(stranger.socket.get(), to, sizeof(Greeting) - stranger.got, MSG_DONTWAIT);
  if (got > 0) stranger.got += static_cast<std::size_t>(got);
  std::uint32_t ours = 0;
  std::memcpy(&ours, stranger.bytes.data(), sizeof ours);
  if (stranger.got >= sizeof ours && ours != Greeting::kOurs) return false;
  const bool nothing = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  return got > 0 || (nothing && SocketClock::now() < stranger.leaves);
}

}  // namespace fusedmoe::comm
