// Keys of a config that concern the experts, and that the family neither reads nor may ignore.
#pragma once

#include "checkpoint/config_keys.h"
#include "checkpoint/family.h"

namespace fusedmoe::checkpoint {

/// Throws Error for a key that the family does not know and whose name says that it may change what
/// the experts or the router compute: the model is then not the one that its model_type names.
/// Objects within the config are searched too, if the family reads keys of theirs.
void check_unknown_keys(const FamilyRow& row, const ConfigKeys& keys);

}  // namespace fusedmoe::checkpoint
