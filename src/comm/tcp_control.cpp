// The control plane over TCP. Rank 0 keeps all texts and serves each rank on a connection of its
// own; rank 0 itself reads its own board. Small and ours, because a general library (Gloo) cannot
// say which rank is missing.
//
// A request: kind, bytes of the name, bytes of the text or milliseconds to wait, name, text. An
// answer to a read: kFound if the text is there, bytes, text. A connection begins with a Greeting
// and ends with kEnd: one that ends without is a rank that has died, and its failure is posted for
// all. Where rank 0 ends first, or takes a process for none of its ranks, the last answer is kLast
// and why the ranks have failed.
#include <algorithm>
#include <atomic>
#include <deque>
#include <set>
#include <thread>

#include "comm/greeting.h"
#include "comm/place.h"
#include "comm/poll.h"
#include "comm/text_board.h"
#include "core/check.h"
#include "core/exception_text.h"

namespace fusedmoe {
namespace comm {
namespace {

using std::chrono::milliseconds;

enum class Kind : std::uint32_t { kPost, kRead, kEnd, kForget };

struct Request {
  Kind kind;
  std::uint32_t name_bytes;
  std::uint64_t value;  // bytes of the text, or milliseconds
};

enum class Found : std::uint32_t { kNothing, kFound, kLast };

struct Answer {
  Found found;
  std::uint32_t bytes;
};

constexpr std::uint32_t kMaxNameBytes = 4096;
constexpr std::uint64_t kMaxTextBytes = kMostGathered + 1;  // and how a gather marks it
/// Of texts that a rank may have here at a time: of the two gathers that ranks can be in.
constexpr std::uint64_t kMostKept = 2 * (kMaxTextBytes + kMaxNameBytes) + (std::uint64_t{1} << 20);
/// A read waits in parts of this length, between which the connection is free for other threads.
constexpr milliseconds kPart{100};
/// How much later than asked for an answer may come before rank 0 counts as silent.
constexpr milliseconds kGrace{300};

/// read(to, bytes): false at the end of the connection. Memory is taken as bytes arrive: to say
/// that a text is long takes none.
template <typename Read>
bool read_text(std::string& text, std::uint64_t bytes, const Read& read) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 20;  // at a time
  while (text.size() < bytes) {
    const std::size_t begin = text.size();
    const auto part = static_cast<std::size_t>(std::min(bytes - begin, kMost));
    text.resize(begin + part);
    if (!read(text.data() + begin, part)) return false;
  }
  return true;
}

/// Rank 0.
class Server final : public ControlPlane {
 public:
  Server(int size, Listener listener, const Token& token, milliseconds timeout)
      : size_(size), port_(listener.port) {
    acceptor_ =
        std::thread(&Server::accept_all, this, Welcome(std::move(listener), token), timeout);
  }
  ~Server() override {
    // The others may still read what was posted last.
    wait_for_ends(std::chrono::seconds(2));
    ending_ = true;
    acceptor_.join();
    for (Connection& each : connections_) each.socket.stop_reading();
    wait_for_ends(milliseconds(200));  // who takes no answer holds nobody up
    for (Connection& each : connections_) each.socket.shut_down();
    for (Connection& each : connections_) each.thread.join();
  }

  int port() const { return port_; }
  void post(const std::string& name, std::string_view text) override { board_.post(name, text); }
  void forget(const std::string& name) override { board_.forget(name); }
  std::optional<std::string> read(const std::string& name, milliseconds timeout) override {
    return board_.read(name, timeout);
  }

 private:
  struct Connection {
    Socket socket;
    std::uint32_t rank;
    std::uint64_t kept = 0;  // bytes of its texts
    std::thread thread;
  };
  enum class Next { kGoOn, kEnd, kLost };

  void wait_for_ends(milliseconds most) const {
    const auto deadline = SocketClock::now() + most;
    while (open_ > 0 && SocketClock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(2));
    }
  }

  /// Until all are here; then nobody else gets a connection.
  void accept_all(Welcome welcome, milliseconds timeout) noexcept {
    try {
      accept_ranks(welcome, timeout);
    } catch (...) {
      give_up();
    }
  }
  /// Ends the ranks because of what was thrown here.
  void give_up() noexcept {
    try {
      board_.post("failure", core::format("rank 0: {}", core::current_exception_text()));
    } catch (...) {
      // They notice at their deadlines.
    }
  }

  void accept_ranks(Welcome& welcome, milliseconds timeout) {
    const auto deadline = SocketClock::now() + timeout;
    std::set<std::uint32_t> here{0};
    while (static_cast<int>(here.size()) < size_ && !ending_ && SocketClock::now() < deadline) {
      std::optional<Welcome::Guest> guest = welcome.next(SocketClock::now() + kPollInterval);
      if (!guest) continue;
      const std::uint32_t rank = guest->rank;
      if (rank >= static_cast<std::uint32_t>(size_)) {
        refuse(guest->socket,
               core::format("a process has joined {} ranks as rank {}", size_, rank));
      } else if (!here.insert(rank).second) {
        refuse(guest->socket, core::format("a second process has joined as rank {}", rank));
      } else {
        admit(std::move(guest->socket), rank);
      }
    }
  }

  void admit(Socket guest, std::uint32_t rank) {
    Connection& connection = connections_.emplace_back();
    connection.socket = std::move(guest);
    connection.rank = rank;
    ++open_;
    try {
      connection.thread = std::thread([this, &connection] { serve(connection); });
    } catch (...) {
      --open_;
      const Socket socket = std::move(connection.socket);
      connections_.pop_back();
      refuse(socket,
             core::format("rank 0 cannot serve rank {}: {}", rank, core::current_exception_text()));
    }
  }

  /// Ends the ranks, and tells the guest why; it is not served.
  void refuse(const Socket& guest, const std::string& reason) {
    board_.post("failure", reason);
    write(guest, Found::kLast, reason);
  }

  void serve(Connection& connection) noexcept {
    Next next = Next::kLost;
    try {
      do {
        next = answer(connection);
      } while (next == Next::kGoOn);
    } catch (...) {
      next = Next::kLost;
      give_up();
    }
    try {
      if (next == Next::kLost) tell_reason(connection);
    } catch (...) {
      connection.socket.shut_down();  // it sees that
    }
    --open_;
  }

  void tell_reason(const Connection& connection) {
    if (!ending_) {
      board_.post("failure",
                  core::format("rank {} has died or lost its connection", connection.rank));
    }
    const auto reason = board_.read("failure", milliseconds(0));
    if (reason) write(connection.socket, Found::kLast, *reason);
  }

  Next answer(Connection& connection) {
    const Socket& socket = connection.socket;
    Request request{};
    if (!socket.read(&request, sizeof request) || request.name_bytes > kMaxNameBytes) {
      return Next::kLost;
    }
    if (request.kind == Kind::kEnd) return Next::kEnd;
    std::string name(request.name_bytes, '\0');
    if (!socket.read(name.data(), name.size())) return Next::kLost;
    switch (request.kind) {
      case Kind::kPost:
        return take_text(connection, name, request.value);
      case Kind::kForget: {
        connection.kept -= std::min(connection.kept, board_.drop(name));
        return Next::kGoOn;
      }
      case Kind::kRead: {
        const auto wait = std::min<std::uint64_t>(request.value, kPart.count());
        const std::optional<std::string> text =
            board_.read(name, milliseconds(static_cast<std::int64_t>(wait)));
        const Found found = text ? Found::kFound : Found::kNothing;
        // Who has gone may have said why: what has come is read to its end.
        if (!write(socket, found, text.value_or(""))) socket.stop_reading();
        return Next::kGoOn;
      }
      default:
        return Next::kLost;
    }
  }

  Next take_text(Connection& connection, const std::string& name, std::uint64_t bytes) {
    const std::uint64_t kept = connection.kept + name.size();
    if (bytes > kMostKept || kept + bytes > kMostKept) {
      board_.post("failure",
                  core::format("rank {} has posted {} bytes beside {}; must be at most {}",
                               connection.rank, bytes, kept, kMostKept));
      return Next::kLost;
    }
    std::string text;
    const auto read = [&](char* to, std::size_t part) { return connection.socket.read(to, part); };
    if (!read_text(text, bytes, read)) return Next::kLost;
    connection.kept = kept + bytes;
    board_.post(name, text);
    return Next::kGoOn;
  }

  static bool write(const Socket& socket, Found found, const std::string& text) {
    const Answer answer{found, static_cast<std::uint32_t>(text.size())};
    return socket.write(&answer, sizeof answer) && socket.write(text.data(), text.size());
  }

  const int size_;
  const int port_;
  TextBoard board_;
  std::deque<Connection> connections_;  // of the acceptor until it has ended
  std::atomic<int> open_{0};
  std::atomic<bool> ending_{false};
  std::thread acceptor_;
};

/// Every other rank.
class Client final : public ControlPlane {
 public:
  /// `given`: a user has set the token on each rank, maybe another on one.
  Client(int rank, const Destination& rank_zero, milliseconds timeout, bool given)
      : timeout_(timeout), token_may_differ_(given), socket_(connect_as(rank, rank_zero)) {
    socket_.limit_writes(timeout);
  }
  ~Client() override {
    const Request end{Kind::kEnd, 0, 0};
    socket_.write(&end, sizeof end);
  }

  void post(const std::string& name, std::string_view text) override {
    FUSEDMOE_CHECK(text.size() <= kMaxTextBytes, core::format("text \"{}\"", name),
                   core::format("{} bytes", text.size()),
                   core::format("at most {}", kMaxTextBytes));
    const auto lock = turn();
    send({Kind::kPost, static_cast<std::uint32_t>(name.size()), text.size()}, name);
    check(socket_.write(text.data(), text.size()));
  }
  void forget(const std::string& name) override {
    const auto lock = turn();
    send({Kind::kForget, static_cast<std::uint32_t>(name.size()), 0}, name);
  }

  std::optional<std::string> read(const std::string& name, milliseconds timeout) override {
    const auto deadline = SocketClock::now() + timeout;
    while (true) {
      const auto left = std::chrono::ceil<milliseconds>(deadline - SocketClock::now());
      std::optional<std::string> text = ask(name, std::clamp(left, milliseconds(0), kPart));
      if (text || left <= kPart) return text;
    }
  }
  std::optional<int> silent_rank() const override {
    return silent_ ? std::optional(0) : std::nullopt;
  }

 private:
  /// One request; none: not posted within `wait`, or rank 0, a process that was stopped, is silent.
  /// Its answer is then the first thing that the next request reads.
  std::optional<std::string> ask(const std::string& name, milliseconds wait) {
    const auto lock = turn();
    const auto deadline = SocketClock::now() + wait;
    if (!asked_.empty()) {
      const bool same = asked_ == name;
      std::optional<std::string> text = answer(std::max(deadline, due_));
      if (silent_ || (same && text)) return text;
    }
    send({Kind::kRead, static_cast<std::uint32_t>(name.size()),
          static_cast<std::uint64_t>(wait.count())},
         name);
    asked_ = name;
    due_ = deadline + kGrace;
    return answer(due_);
  }
  /// The answer to a request that has not been answered.
  std::optional<std::string> answer(SocketClock::time_point deadline) {
    silent_ = !socket_.wait_to_read(deadline);
    if (silent_) return std::nullopt;
    asked_.clear();
    const std::optional<Read> found = read_answer(SocketClock::now() + timeout_);
    check(found && found->kind != Found::kLast);
    return found->kind == Found::kFound ? std::optional(found->text) : std::nullopt;
  }
  struct Read {
    Found kind;
    std::string text;
  };
  /// None: the connection has ended.
  std::optional<Read> read_answer(SocketClock::time_point deadline) {
    Answer answer{};
    if (!socket_.read(&answer, sizeof answer, deadline)) return std::nullopt;
    Read result{answer.found, {}};
    const auto read = [&](char* to, std::size_t part) { return socket_.read(to, part, deadline); };
    if (!read_text(result.text, answer.bytes, read)) return std::nullopt;
    if (result.kind == Found::kLast) reason_ = result.text;
    token_may_differ_ = false;
    return result;
  }
  /// The connection for one request. Who waits for it gets it before who has just had it: a mutex
  /// alone may be taken again and again by the thread that reads.
  std::unique_lock<std::mutex> turn() {
    const std::lock_guard next(next_);
    return std::unique_lock(mutex_);
  }
  void send(const Request& request, const std::string& name) {
    check(socket_.write(&request, sizeof request) && socket_.write(name.data(), name.size()));
  }
  void check(bool alive) {
    if (alive) return;
    while (read_answer(SocketClock::now())) {  // the last thing that came may say why
    }
    throw Error::communication(
        token_may_differ_ ? "rank 0 closed the connection: it has died, or the token differs"
                          : reason_);
  }

  std::mutex next_, mutex_;
  const milliseconds timeout_;
  std::string asked_;  // what the last request without an answer reads; empty: all have theirs
  SocketClock::time_point due_;
  std::atomic<bool> silent_{false};
  bool token_may_differ_;  // until an answer has come
  std::string reason_ = "rank 0 has died or lost its connection";
  Socket socket_;
};

}  // namespace
}  // namespace comm

std::shared_ptr<ControlPlane> make_tcp_control_plane(int rank, int size, const std::string& address,
                                                     int port, std::chrono::milliseconds timeout,
                                                     std::string_view token) {
  comm::check_place(rank, size, timeout);
  FUSEDMOE_CHECK(port > 0 && port < 65536, "port", core::to_string(port), "in [1, 65535]");
  const comm::Token secret = comm::Token::given(token);
  const auto deadline = comm::SocketClock::now() + timeout;
  if (rank > 0) {
    const comm::Destination rank_zero{0, address, port, deadline, secret};
    return std::make_shared<comm::Client>(rank, rank_zero, timeout, !secret.empty());
  }
  return std::make_shared<comm::Server>(
      size, comm::listen_at(address, port, !secret.empty(), deadline), secret, timeout);
}

std::shared_ptr<ControlPlane> make_control_plane(int rank, int size, const GatherCallback& gather,
                                                 std::chrono::milliseconds timeout) {
  comm::check_place(rank, size, timeout);
  const auto gather_all = [&](const std::string& text) {
    std::vector<std::string> texts = gather(text);
    FUSEDMOE_CHECK(static_cast<int>(texts.size()) == size, "gather",
                   core::format("{} texts", texts.size()), core::format("{}, one a rank", size));
    return texts;
  };
  const std::vector<std::string> hosts = gather_all(comm::host_name());
  const bool one_host = std::set(hosts.begin(), hosts.end()).size() == 1;
  std::shared_ptr<comm::Server> server;
  std::string mine;  // of rank 0: its port and its token, or '!' and why it has none
  if (rank == 0) {
    try {
      const comm::Token token = comm::Token::draw();
      comm::Listener listener =
          one_host ? comm::listen_on_loopback() : comm::listen_for_all_hosts();
      server = std::make_shared<comm::Server>(size, std::move(listener), token, timeout);
      mine = core::format("{} {}", server->port(), token.text());
    } catch (...) {
      mine = "!" + core::current_exception_text();
    }
  }
  const std::string place = gather_all(mine).front();
  if (place.starts_with('!')) {
    throw Error::communication(core::format("rank 0: {}", place.substr(1)));
  }
  if (rank == 0) return server;
  const auto [port, token] = comm::port_and_token(0, place);
  return std::make_shared<comm::Client>(
      rank,
      comm::Destination{0, one_host ? "127.0.0.1" : hosts.front(), port,
                        comm::SocketClock::now() + timeout, token},
      timeout, false);
}

}  // namespace fusedmoe
