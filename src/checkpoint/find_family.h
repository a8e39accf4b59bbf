// Which family a config.json is of, and which of its objects holds the language model's keys.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>

#include "checkpoint/family.h"

namespace fusedmoe::checkpoint {

struct FoundFamily {
  std::shared_ptr<const FamilyRow> row;
  const nlohmann::json* node;
};

/// `given`: the caller's choice instead of the model_type; may be null. Throws Error for a model
/// that no description fits or that is refused, and where architectures names another family.
FoundFamily find_family_of(const nlohmann::json& root, std::shared_ptr<const FamilyRow> given);

}  // namespace fusedmoe::checkpoint
