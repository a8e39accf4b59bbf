// Variables of the environment, for tests of what reads them.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

namespace fusedmoe::testing {

/// Sets a variable of the environment for a while, or unsets it; then it is as it was.
class Variable {
 public:
  explicit Variable(const char* name, const char* value = nullptr) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    set(value);
  }
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const char* value) const { value ? setenv(name_, value, 1) : unsetenv(name_); }
  const char* name_;
  std::optional<std::string> before_;
};

}  // namespace fusedmoe::testing
