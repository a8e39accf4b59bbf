// The descriptions of model families. Those that the library brings along are the JSON files in
// families/; the build compiles their text into it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/family_row.h"

namespace fusedmoe::checkpoint {

/// Every built-in description, also those of families that are refused.
std::span<const std::shared_ptr<const FamilyRow>> family_table();
/// The description of a model_type; null if there is none.
std::shared_ptr<const FamilyRow> find_family(std::string_view model_type);
/// That of a name, or the last one of a JSON file. Throws Error.
std::shared_ptr<const FamilyRow> load_family(const std::string& name_or_file);
/// The descriptions in a JSON text, which may build on built-in ones. Throws Error naming the
/// place.
std::vector<std::shared_ptr<const FamilyRow>> parse_families(std::string_view json,
                                                             const std::string& label);

const FamilyRow& family_row(const Family& family);

}  // namespace fusedmoe::checkpoint
