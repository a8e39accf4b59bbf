// Connections to the ports of ranks, of somebody who may be none.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace fusedmoe::testing {

/// A connection of somebody who may be no rank.
class RawSocket {
 public:
  explicit RawSocket(int connected) : socket_(connected) {}
  RawSocket(int port, std::string_view says, const char* address = "127.0.0.1")
      : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = inet_addr(address);
    to.sin_port = htons(static_cast<std::uint16_t>(port));
    if (::connect(socket_, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) {
      ::close(socket_);
      throw std::runtime_error("nobody listens at the port");
    }
    send(says);
  }
  RawSocket(RawSocket&& other) noexcept : socket_(std::exchange(other.socket_, -1)) {}
  ~RawSocket() {
    if (socket_ >= 0) ::close(socket_);
  }
  /// Whether the other side has closed it; waits until it does, or says something.
  bool is_closed() const {
    char byte = 0;
    return ::recv(socket_, &byte, 1, 0) <= 0;
  }
  /// All that comes until the other side closes it.
  std::string text() const {
    std::string all;
    char byte = 0;
    while (::recv(socket_, &byte, 1, 0) > 0) all += byte;
    return all;
  }
  void send(std::string_view text) const {
    const auto bytes = static_cast<ssize_t>(text.size());
    EXPECT_EQ(::send(socket_, text.data(), text.size(), MSG_NOSIGNAL), bytes);
  }

 private:
  int socket_;
};

/// Lets one connection wait.
class RawListener {
 public:
  RawListener() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in place{};
    place.sin_family = AF_INET;
    place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof place;
    EXPECT_EQ(::bind(socket_, reinterpret_cast<sockaddr*>(&place), size), 0);
    EXPECT_EQ(::listen(socket_, 0), 0);
    EXPECT_EQ(::getsockname(socket_, reinterpret_cast<sockaddr*>(&place), &size), 0);
    port_ = ntohs(place.sin_port);
  }
  ~RawListener() { ::close(socket_); }
  int port() const { return port_; }
  RawSocket accept() const { return RawSocket(::accept(socket_, nullptr, nullptr)); }

 private:
  int socket_, port_ = 0;
};

inline constexpr const char* kToken = "the-secret-of-a-test";

/// What a rank says when it has connected: that it is one, its number, and the token.
inline std::string greeting_of(std::uint32_t rank, const std::string& token) {
  const std::uint32_t words[] = {0x666d6f65, rank};
  std::string text(reinterpret_cast<const char*>(words), sizeof words);
  text.append(token).resize(sizeof words + 64);
  return text;
}

/// Behind the port in what a rank tells the others: "40213 c0ffee...".
inline std::string token_in(const std::string& place) {
  return place.substr(place.find(' ') + 1);
}

/// A port of 127.0.0.1 that nobody uses now.
inline int free_port() {
  return RawListener().port();
}

}  // namespace fusedmoe::testing
