#include "comm/token.h"

#include <sys/random.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "core/check.h"

namespace fusedmoe::comm {

Token::Token(std::string_view text, std::string_view argument) {
  const bool printable =
      std::all_of(text.begin(), text.end(), [](unsigned char c) { return c >= 0x21 && c <= 0x7e; });
  FUSEDMOE_CHECK(
      text.size() >= kLeast && text.size() <= kMost && printable, argument,
      core::format("{} characters{}", text.size(),
                   printable ? "" : ", not all of them printable ASCII"),
      core::format("{} to {} printable ASCII characters without blanks, the same on all ranks",
                   kLeast, kMost));
  text.copy(bytes_.data(), text.size());
}

Token Token::given(std::string_view text) {
  if (!text.empty()) return Token(text, "token");
  const char* set = std::getenv(kTokenVariable);
  return set && *set ? Token(set, kTokenVariable) : Token();
}

Token Token::draw() {
  std::array<std::uint8_t, kMost / 2> bits{};
  if (getrandom(bits.data(), bits.size(), 0) != static_cast<ssize_t>(bits.size())) {
    throw Error::communication("the system has no random numbers for a token");
  }
  constexpr std::string_view kDigits = "0123456789abcdef";
  Token token;
  for (std::size_t i = 0; i < kMost; ++i) {
    token.bytes_[i] = kDigits[(bits[i / 2] >> (i % 2 * 4)) & 15];
  }
  return token;
}

std::string Token::text() const {
  return {bytes_.begin(), std::find(bytes_.begin(), bytes_.end(), '\0')};
}

bool Token::is(const Bytes& other) const {
  volatile char difference = 0;  // no compiler may stop at the first
  for (std::size_t i = 0; i < kMost; ++i) {
    difference = static_cast<char>(difference | (bytes_[i] ^ other[i]));
  }
  return difference == 0;
}

}  // namespace fusedmoe::comm
