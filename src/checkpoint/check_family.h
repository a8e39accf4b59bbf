// What a description may not say: fields that nothing reads, and numbers that no model has.
#pragma once

#include <string>

#include "checkpoint/family_row.h"

namespace fusedmoe::checkpoint {

/// Throws Error naming the place for a description that says what is never read, or contradicts
/// itself.
void check_family(const FamilyRow& row, const std::string& label);

}  // namespace fusedmoe::checkpoint
