// The steps beside the reference experts.
#pragma once

#include "moe/backend.h"

namespace fusedmoe::reference {

const core::Backend& backend();

}  // namespace fusedmoe::reference
