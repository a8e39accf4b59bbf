#include "fusedmoe/tensor.h"

#include "core/format.h"

namespace fusedmoe {

Error::Error(std::string argument, std::string was, std::string must_be)
    : std::runtime_error(core::format("{}: was {}; must be {}", argument, was, must_be)),
      argument_(std::move(argument)),
      was_(std::move(was)),
      must_be_(std::move(must_be)) {}

}  // namespace fusedmoe
