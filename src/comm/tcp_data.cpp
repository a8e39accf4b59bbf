// The data plane over TCP: a connection between any two ranks. A message is its number of bytes,
// then the bytes. For processes that have neither MPI nor NCCL: everything is copied through the
// kernel.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/greeting.h"
#include "comm/place.h"
#include "comm/poll.h"
#include "core/check.h"

namespace fusedmoe {
namespace comm {
namespace {

/// The messages of one exchange to a peer, or from it, and how far they have come.
struct Queue {
  std::vector<Message> messages;
  std::size_t current = 0;
  std::uint64_t header = 0;  // of the current one
  std::size_t moved = 0;     // bytes of the current one, its header with them

  bool done() const { return current == messages.size(); }
};

class TcpData final : public DataPlane {
 public:
  TcpData(int rank, int size, ControlPlane& control, std::chrono::milliseconds timeout)
      : rank_(rank), peers_(static_cast<std::size_t>(size)) {
    const auto deadline = SocketClock::now() + timeout;
    const std::vector<std::string> hosts = hosts_of_all(control, deadline);
    const bool one_host = std::count(hosts.begin(), hosts.end(), hosts[rank]) == size;
    const Token token = Token::draw();
    Listener listener = one_host ? listen_on_loopback() : listen_for_all_hosts();
    control.post(name_of(rank), core::format("{} {}", listener.port, token.text()));
    Welcome welcome(std::move(listener), token);
    // Every rank connects to those before it and waits for those behind it.
    for (int r = 0; r < rank; ++r) {
      connect_to(r, one_host ? "127.0.0.1" : hosts[r], control, deadline);
    }
    for (std::vector<int> missing = not_connected(); !missing.empty(); missing = not_connected()) {
      if (SocketClock::now() >= deadline) {
        throw Error::communication(
            core::format("joining over TCP: {} {} did not connect within {} s",
                         missing.size() == 1 ? "rank" : "ranks", core::join(missing, ", "),
                         static_cast<double>(timeout.count()) / 1000));
      }
      control.check_failure();
      accept(welcome, std::min(deadline, SocketClock::now() + kPollInterval));
    }
    for (const Peer& peer : peers_) {
      if (peer.socket) ::fcntl(peer.socket.get(), F_SETFL, O_NONBLOCK);
    }
  }

  std::string_view name() const override { return "tcp"; }
  void abort() noexcept override {
    for (const Peer& peer : peers_) peer.socket.shut_down();
  }

  void exchange(std::span<const Message> sends, std::span<const Message> receives, Stream,
                Waiting& waiting) override {
    for (Peer& peer : peers_) peer.out = peer.in = {};
    for (const Message& each : sends) {
      if (each.bytes > 0) peers_[each.peer].out.messages.push_back(each);
    }
    for (const Message& each : receives) {
      if (each.bytes > 0) peers_[each.peer].in.messages.push_back(each);
    }
    copy_own(peers_[rank_]);
    while (true) {
      bool moved = false;
      std::vector<int> late;
      for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
        Peer& peer = peers_[r];
        while (!peer.out.done() && send(r)) moved = true;
        while (!peer.in.done() && receive(r)) moved = true;
        if (!peer.out.done() || !peer.in.done()) late.push_back(r);
      }
      if (moved) waiting.moved();
      if (late.empty()) return;
      if (!moved) wait(late);
      waiting.check(late);
    }
  }

 private:
  struct Peer {
    Socket socket;
    Queue out, in;
  };

  static std::string name_of(int rank) { return core::format("tcp data/{}", rank); }

  /// The text that another rank has posted, or has not until the deadline.
  static std::string text_of(int r, const std::string& name, ControlPlane& control,
                             SocketClock::time_point deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - SocketClock::now());
    const std::optional<std::string> text = control.read_or_fail(name, left);
    if (!text) throw Error::communication(core::format("joining: rank {} is not there", r));
    return *text;
  }

  std::vector<std::string> hosts_of_all(ControlPlane& control,
                                        SocketClock::time_point deadline) const {
    const auto name_of_host = [](int r) { return core::format("tcp data/host/{}", r); };
    control.post(name_of_host(rank_), host_name());
    std::vector<std::string> hosts;
    hosts.reserve(peers_.size());
    for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
      hosts.push_back(text_of(r, name_of_host(r), control, deadline));
    }
    return hosts;
  }

  /// The ranks behind this one that are not here yet.
  std::vector<int> not_connected() const {
    std::vector<int> ranks;
    for (int r = rank_ + 1; r < static_cast<int>(peers_.size()); ++r) {
      if (!peers_[r].socket) ranks.push_back(r);
    }
    return ranks;
  }

  /// Waits for the next rank.
  void accept(Welcome& welcome, SocketClock::time_point until) {
    std::optional<Welcome::Guest> guest = welcome.next(until);
    if (!guest) return;
    const std::uint32_t other = guest->rank;
    const auto size = static_cast<std::uint32_t>(peers_.size());
    FUSEDMOE_CHECK(other > static_cast<std::uint32_t>(rank_) && other < size, "rank",
                   core::to_string(other), core::format("in ({}, {})", rank_, size));
    FUSEDMOE_CHECK(!peers_[other].socket, "rank",
                   core::format("{}, which has connected already", other), "that of one process");
    peers_[other].socket = std::move(guest->socket);
  }

  void connect_to(int r, const std::string& host, ControlPlane& control,
                  SocketClock::time_point deadline) {
    const auto [port, token] = port_and_token(r, text_of(r, name_of(r), control, deadline));
    peers_[r].socket =
        connect_as(rank_, {r, host, port, deadline, token, [&] { control.check_failure(); }});
  }

  [[noreturn]] static void lost(int r) {
    throw Error::communication(core::format("the connection to rank {} has ended", r));
  }
  static void check_size(std::uint64_t bytes, const Message& message, int r) {
    FUSEDMOE_CHECK(bytes == message.bytes, "message",
                   core::format("{} bytes from rank {}", bytes, r),
                   core::format("{} bytes", message.bytes));
  }

  void copy_own(Peer& own) const {
    for (; !own.in.done() && !own.out.done(); ++own.in.current, ++own.out.current) {
      const Message& from = own.out.messages[own.out.current];
      const Message& to = own.in.messages[own.in.current];
      check_size(from.bytes, to, rank_);
      std::memcpy(to.data, from.data, to.bytes);
    }
    FUSEDMOE_CHECK(own.in.done() && own.out.done(), "messages", "one without the other",
                   "a receive for each send to the own rank");
  }

  /// Moves a part of the current message; false: nothing can move now.
  bool send(int r) {
    return step(r, peers_[r].out, [](int socket, void* data, std::size_t bytes) {
      return ::send(socket, data, bytes, MSG_NOSIGNAL);
    });
  }
  bool receive(int r) {
    return step(r, peers_[r].in, [](int socket, void* data, std::size_t bytes) {
      return ::recv(socket, data, bytes, 0);
    });
  }

  template <typename Transfer>
  bool step(int r, Queue& queue, const Transfer& transfer) {
    constexpr std::size_t kHeader = sizeof queue.header;
    const Message& message = queue.messages[queue.current];
    const bool in = &queue == &peers_[r].in;
    if (queue.moved == 0 && !in) queue.header = message.bytes;
    const bool in_header = queue.moved < kHeader;
    const std::size_t before = in_header ? queue.moved : queue.moved - kHeader;
    char* data =
        (in_header ? reinterpret_cast<char*>(&queue.header) : static_cast<char*>(message.data)) +
        before;
    const std::size_t left = (in_header ? kHeader : message.bytes) - before;
    const ssize_t bytes = transfer(peers_[r].socket.get(), data, left);
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
    if (bytes <= 0) lost(r);
    queue.moved += static_cast<std::size_t>(bytes);
    if (queue.moved == kHeader && in) check_size(queue.header, message, r);
    if (queue.moved < kHeader + message.bytes) return true;
    ++queue.current;
    queue.moved = 0;
    return true;
  }

  /// For a few milliseconds, or until a connection can go on.
  void wait(std::span<const int> late) const {
    std::vector<pollfd> descriptors;
    for (const int r : late) {
      short events = 0;
      if (!peers_[r].in.done()) events |= POLLIN;
      if (!peers_[r].out.done()) events |= POLLOUT;
      descriptors.push_back({peers_[r].socket.get(), events, 0});
    }
    ::poll(descriptors.data(), descriptors.size(), 5);
  }

  const int rank_;
  std::vector<Peer> peers_;  // the own one has no connection
};

}  // namespace
}  // namespace comm

std::shared_ptr<DataPlane> make_tcp_data_plane(int rank, int size,
                                               const std::shared_ptr<ControlPlane>& control,
                                               std::chrono::milliseconds timeout) {
  comm::check_place(rank, size, timeout);
  FUSEDMOE_CHECK_FAULT(control, kNull, "control", "null", "a control plane");
  return std::make_shared<comm::TcpData>(rank, size, *control, timeout);
}

}  // namespace fusedmoe
