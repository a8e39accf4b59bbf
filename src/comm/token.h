// The secret of a job. Who connects to a port of one of its ranks must know it: anybody may
// connect.
#pragma once

#include <array>
#include <string>
#include <string_view>

namespace fusedmoe::comm {

/// What users set on every rank.
inline constexpr const char* kTokenVariable = "FUSEDMOE_TOKEN";

class Token {
 public:
  static constexpr std::size_t kLeast = 16, kMost = 64;
  using Bytes = std::array<char, kMost>;  // ends with zeros

  /// None: who knows nothing else is let in.
  Token() = default;
  /// Throws Error unless `text` has kLeast to kMost characters. The Error names `argument`, and
  /// never contains the text.
  Token(std::string_view text, std::string_view argument);
  /// `text` if it is given, else that of the environment, else none.
  static Token given(std::string_view text);
  /// A new one, which nobody can guess.
  static Token draw();

  bool empty() const { return bytes_.front() == '\0'; }
  const Bytes& bytes() const { return bytes_; }
  /// To tell it to another rank. Never to be printed.
  std::string text() const;
  /// In a time that does not depend on how much is right.
  bool is(const Bytes& other) const;

 private:
  Bytes bytes_{};
};

}  // namespace fusedmoe::comm
