// An expected Error: its text, and the argument that it names.
#pragma once

#include <string>

#include "fusedmoe/tensor.h"

namespace fusedmoe::testing {

template <typename Function>
std::string error_text(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

template <typename Function>
std::string argument_of(Function&& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.argument();
  }
  return "no error";
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t p = text.find(part); p != std::string::npos; p = text.find(part, p + 1)) ++count;
  return count;
}

}  // namespace fusedmoe::testing
