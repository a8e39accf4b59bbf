// Text from a format string in fmt's syntax. fmt itself is compiled in one file only, format.cpp:
// its headers would be most of the time that any other file takes to compile.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fusedmoe::core {

/// One argument: an integer, a number, a boolean, a text or an address.
struct FormatArg {
  enum class Kind { kInt, kUint, kFloat, kDouble, kBool, kChar, kText, kPointer };

  Kind kind;
  union {
    std::int64_t as_int;
    std::uint64_t as_uint;
    float as_float;
    double as_double;
    bool as_bool;
    char as_char;
    std::string_view as_text;
    const void* as_pointer;
  };

  FormatArg(std::signed_integral auto value) : kind(Kind::kInt), as_int(value) {}
  FormatArg(std::unsigned_integral auto value) : kind(Kind::kUint), as_uint(value) {}
  FormatArg(float value) : kind(Kind::kFloat), as_float(value) {}
  FormatArg(double value) : kind(Kind::kDouble), as_double(value) {}
  FormatArg(bool value) : kind(Kind::kBool), as_bool(value) {}
  FormatArg(char value) : kind(Kind::kChar), as_char(value) {}
  FormatArg(std::string_view value) : kind(Kind::kText), as_text(value) {}
  FormatArg(const std::string& value) : kind(Kind::kText), as_text(value) {}
  FormatArg(const char* value) : kind(Kind::kText), as_text(value) {}
  FormatArg(const void* value) : kind(Kind::kPointer), as_pointer(value) {}
};

std::string format_args(std::string_view text, const FormatArg* args, std::size_t count);

/// A format string with as many fields as there are arguments: anything else does not compile.
template <std::size_t kArgs>
struct FormatString {
  std::string_view text;

  consteval FormatString(const char* literal) : text(literal) {
    std::size_t fields = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '{') continue;
      if (i + 1 < text.size() && text[i + 1] == '{') {
        ++i;
      } else {
        ++fields;
      }
    }
    if (fields != kArgs) throw "the format string has another number of fields";
  }
};

/// fmt::format for the arguments above.
template <typename... Args>
std::string format(FormatString<sizeof...(Args)> text, const Args&... args) {
  const FormatArg list[] = {FormatArg(args)..., FormatArg(0)};  // not empty
  return format_args(text.text, list, sizeof...(Args));
}

inline std::string to_string(FormatArg value) {
  return format_args("{}", &value, 1);
}

/// The texts with `separator` between them.
template <typename Texts>
std::string join(const Texts& texts, std::string_view separator) {
  std::string result;
  bool first = true;
  for (const auto& text : texts) {
    if (!first) result += separator;
    first = false;
    result += to_string(FormatArg(text));
  }
  return result;
}

}  // namespace fusedmoe::core
