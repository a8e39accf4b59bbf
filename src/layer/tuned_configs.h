// The file of tuned kernel configurations.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "moe/tuned_configs.h"

namespace fusedmoe {

/// {"version": 2, "configs": [objects with the members of TunedConfig, measured_by only where it is
/// set]} and, of a report, "report": an object for people. Throws Error for anything else: other
/// members or types, sizes below 1, a key that comes twice.
TunedConfigs parse_tuned_configs(std::string_view json);
TunedConfigs load_tuned_configs(const std::filesystem::path& path);
/// `report`: JSON of the object, or empty.
std::string to_json(const TunedConfigs& configs, std::string_view report = {});
/// Makes the folder where it is missing; the file appears complete or not at all.
void save_tuned_configs(const TunedConfigs& configs, const std::filesystem::path& path,
                        std::string_view report = {});

/// The file that make_context() reads: what the environment variable FUSEDMOE_TUNED_CONFIGS says,
/// else fusedmoe/tuned_configs.json in $XDG_CACHE_HOME or ~/.cache. Empty where the variable is, or
/// where there is no home: no file is read.
std::filesystem::path tuned_configs_path();

/// Those of that file, read once. Throws Error if the variable names a file that cannot be read; a
/// cached one that cannot counts as empty.
const TunedConfigs& tuned_configs();

}  // namespace fusedmoe
