// The one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>

#include "fusedmoe/export.h"

namespace fusedmoe {

/// Thrown for every invalid argument, file or configuration, before any work starts and before
/// any output is touched. Names the argument, what it was, and what it must be.
class FUSEDMOE_API Error : public std::runtime_error {
 public:
  Error(std::string argument, std::string was, std::string must_be);

  /// The argument, tensor or file at fault, for example `topk_ids` or `w13.scales`.
  const std::string& argument() const noexcept { return argument_; }
  const std::string& was() const noexcept { return was_; }
  const std::string& must_be() const noexcept { return must_be_; }

 private:
  std::string argument_;
  std::string was_;
  std::string must_be_;
};

}  // namespace fusedmoe
