// Scripts by which shells complete the program's command lines.
#pragma once

#include <string>

#include "command_info.h"

namespace fusedmoe::cli {

/// For "bash", "zsh" or "fish".
std::string completion_script(const ProgramInfo& program, const std::string& shell);

}  // namespace fusedmoe::cli
