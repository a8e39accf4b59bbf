#include "fusedmoe/version.h"

namespace fusedmoe {

const char* version() noexcept {
  return FUSEDMOE_VERSION;
}

}  // namespace fusedmoe
