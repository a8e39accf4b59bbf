// Keys of a config that concern the experts, and that the family neither reads nor may ignore.
#pragma once

#include "checkpoint/config_keys.h"
#include "checkpoint/family.h"

namespace fusedmoe::checkpoint {

/// Throws Error for a key that changes what experts or router compute, as far as its name tells,
/// and that means nothing to the family: the model is then not what its model_type says. Objects
/// below are judged where the family reads from them.
void check_unknown_keys(const FamilyRow& row, const ConfigKeys& keys);

}  // namespace fusedmoe::checkpoint
