// The fast experts on the CPU.
#pragma once

#include "fusedmoe/experts.h"

namespace fusedmoe::cpu {

const ExpertsDescriptor& descriptor();

}  // namespace fusedmoe::cpu
