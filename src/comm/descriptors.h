// File descriptors from one process of a host to another, over local sockets whose names the ranks
// tell each other.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "comm/socket.h"
#include "comm/token.h"

namespace fusedmoe::comm {

/// A socket at which descriptors arrive. Its name has no place in the file system.
class DescriptorSocket {
 public:
  /// Throws Error where the system gives none.
  DescriptorSocket();
  ~DescriptorSocket();
  DescriptorSocket(const DescriptorSocket&) = delete;
  DescriptorSocket& operator=(const DescriptorSocket&) = delete;

  /// What another rank must know to send something here; of printable characters.
  std::string address() const;
  /// Sends a copy of a descriptor to the socket with this address(), as that of `rank`. False: as
  /// many lie unread there as the system allows. Throws Error where nobody is there.
  bool send(std::string_view address, int rank, int descriptor) const;
  /// Waits for a descriptor from someone who knows this address, and sets `rank`. Empty: none came
  /// until then.
  Socket receive(int& rank, SocketClock::time_point until) const;
  /// Gives each of the others, ranks and addresses, a copy of this rank's descriptor and gets
  /// theirs, while they do the same. Calls meanwhile() every few milliseconds. Throws Error at the
  /// deadline.
  std::map<int, Socket> exchange(int rank, int descriptor, const std::map<int, std::string>& others,
                                 SocketClock::time_point deadline,
                                 const std::function<void()>& meanwhile) const;

 private:
  const Socket socket_;
  const Token token_ = Token::draw();
};

}  // namespace fusedmoe::comm
