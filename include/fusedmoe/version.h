// The version of these headers, and that of the library that is loaded. The only place where the
// numbers stand: CMake and the Python package read them here. C takes this header too.
#pragma once

#define FUSEDMOE_VERSION_MAJOR 0
#define FUSEDMOE_VERSION_MINOR 2
#define FUSEDMOE_VERSION_PATCH 0

/// "0.2.0", as a literal.
#define FUSEDMOE_VERSION                                                       \
  FUSEDMOE_VERSION_TEXT(FUSEDMOE_VERSION_MAJOR)                                \
  "." FUSEDMOE_VERSION_TEXT(FUSEDMOE_VERSION_MINOR) "." FUSEDMOE_VERSION_TEXT( \
      FUSEDMOE_VERSION_PATCH)
#define FUSEDMOE_VERSION_TEXT(number) FUSEDMOE_VERSION_QUOTED(number)
#define FUSEDMOE_VERSION_QUOTED(number) #number

#ifdef __cplusplus
#include "fusedmoe/export.h"

namespace fusedmoe {

/// Of the library: differs from FUSEDMOE_VERSION where a program runs with another one than it was
/// compiled with.
FUSEDMOE_API const char* version() noexcept;

}  // namespace fusedmoe
#endif
