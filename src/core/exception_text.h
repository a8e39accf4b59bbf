// What an exception says, whatever its type.
#pragma once

#include <exception>
#include <string>

namespace fusedmoe::core {

/// Of the exception that a catch block has caught.
inline std::string current_exception_text() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown exception";
  }
}

}  // namespace fusedmoe::core
