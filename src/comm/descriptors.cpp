#include "comm/descriptors.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "comm/poll.h"
#include "core/format.h"
#include "fusedmoe/error.h"

namespace fusedmoe::comm {
namespace {

/// What comes with a descriptor.
struct Letter {
  Token::Bytes token;
  int rank;
};

/// A datagram with room for one descriptor beside it.
class Datagram {
 public:
  explicit Datagram(Letter& letter) : part_{&letter, sizeof letter} {
    message_.msg_iov = &part_;
    message_.msg_iovlen = 1;
    message_.msg_control = control_.data();
    message_.msg_controllen = control_.size();
  }
  Datagram(const Datagram&) = delete;
  Datagram& operator=(const Datagram&) = delete;

  msghdr* get() { return &message_; }
  void attach(int descriptor) {
    cmsghdr* head = CMSG_FIRSTHDR(&message_);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
  }
  /// That which has arrived; -1: none.
  int attached() {
    const cmsghdr* head = CMSG_FIRSTHDR(&message_);
    if (!head || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) return -1;
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(head), sizeof descriptor);
    return descriptor;
  }

 private:
  iovec part_;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control_{};
  msghdr message_{};
};

Error failed(std::string_view what, int code) {
  return Error::communication(core::format("{}: {}", what, std::strerror(code)));
}

/// Names that the system chooses begin with a zero and have no end.
constexpr std::size_t kNameBegin = offsetof(sockaddr_un, sun_path) + 1;

}  // namespace

DescriptorSocket::DescriptorSocket()
    : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  const sa_family_t family = AF_UNIX;
  sockaddr_un none{};
  none.sun_family = family;
  if (!socket_ || ::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&none), sizeof family)) {
    throw failed("cannot make a local socket", errno);
  }
}

DescriptorSocket::~DescriptorSocket() = default;

std::string DescriptorSocket::address() const {
  sockaddr_un name{};
  socklen_t bytes = sizeof name;
  if (::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&name), &bytes) != 0) {
    throw failed("a local socket has no name", errno);
  }
  return token_.text() + std::string(name.sun_path + 1, bytes - kNameBegin);
}

bool DescriptorSocket::send(std::string_view address, int rank, int descriptor) const {
  Letter letter{{}, rank};
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (address.size() < Token::kMost || address.size() - Token::kMost >= sizeof name.sun_path) {
    throw Error::communication("a rank has told an address that is none");
  }
  address.copy(letter.token.data(), Token::kMost);
  const std::string_view path = address.substr(Token::kMost);
  path.copy(name.sun_path + 1, path.size());
  Datagram datagram(letter);
  datagram.get()->msg_name = &name;
  datagram.get()->msg_namelen = static_cast<socklen_t>(kNameBegin + path.size());
  datagram.attach(descriptor);
  if (::sendmsg(socket_.get(), datagram.get(), MSG_NOSIGNAL) >= 0) return true;
  if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
  throw failed("cannot send a descriptor to another process of this host", errno);
}

Socket DescriptorSocket::receive(int& rank, SocketClock::time_point until) const {
  while (socket_.wait_to_read(until)) {
    Letter letter{};
    Datagram datagram(letter);
    if (::recvmsg(socket_.get(), datagram.get(), MSG_CMSG_CLOEXEC) < 0) continue;
    Socket descriptor(datagram.attached());  // closes what a stranger has sent
    if (!token_.is(letter.token)) continue;
    if ((datagram.get()->msg_flags & MSG_CTRUNC) != 0) {
      throw Error::communication(
          "a descriptor came that this process has no room for: see `ulimit -n`");
    }
    if (!descriptor) continue;
    rank = letter.rank;
    return descriptor;
  }
  return {};
}

/// Who cannot send takes what has come, so that the others can send.
std::map<int, Socket> DescriptorSocket::exchange(int rank, int descriptor,
                                                 const std::map<int, std::string>& others,
                                                 SocketClock::time_point deadline,
                                                 const std::function<void()>& meanwhile) const {
  std::map<int, Socket> theirs;
  auto next = others.begin();
  while (true) {
    while (next != others.end() && send(next->second, rank, descriptor)) ++next;
    if (next == others.end() && theirs.size() == others.size()) return theirs;
    const auto now = SocketClock::now();
    if (now >= deadline) throw Error::communication("no descriptor came from another process");
    meanwhile();
    int from = -1;
    Socket came = receive(from, std::min(deadline, now + kPollInterval));
    if (came && (!others.contains(from) || !theirs.emplace(from, std::move(came)).second)) {
      throw Error::communication(core::format("a descriptor came from rank {}", from));
    }
  }
}

}  // namespace fusedmoe::comm
