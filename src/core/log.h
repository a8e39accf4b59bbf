// Messages for the program's log hook, if it has set one.
#pragma once

#include <string>

#include "fusedmoe/log.h"

namespace fusedmoe::core {

/// Whether somebody listens: making a message may cost more than there is to say.
bool has_log_hook();
/// Calls the hook, unless it has heard the same before.
void log(LogLevel level, const std::string& message);

}  // namespace fusedmoe::core
