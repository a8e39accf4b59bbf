// Which modules of a model a quantization config means.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace fusedmoe::checkpoint {

struct FamilyRow;

/// Full names of an expert's linear layers in a few layers: one list for each way in which the
/// family may call them.
using ExpertModules = std::vector<std::vector<std::string>>;
ExpertModules expert_modules(const FamilyRow& row, std::int64_t num_layers);

/// The name of the group of `config_groups` that holds these modules, called in the way that the
/// targets say most about; nothing if none does or `ignore` lists them. A target is a module's
/// name, its class ("Linear"), or "re:" and a pattern for the beginning of the name. Throws Error
/// if the modules are in several groups.
std::optional<std::string> group_of_modules(const nlohmann::json& groups,
                                            const nlohmann::json* ignore,
                                            const ExpertModules& modules, const std::string& label);

}  // namespace fusedmoe::checkpoint
