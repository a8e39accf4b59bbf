// What the library says about its choices. It prints nothing by itself: who wants to hear it sets a
// hook.
#pragma once

#include <functional>
#include <string_view>

#include "fusedmoe/export.h"

namespace fusedmoe {

/// The numbers are those of Python's logging.
enum class LogLevel : int {
  kInfo = 20,     ///< what was chosen, with which kernel configurations, and why not the others
  kWarning = 30,  ///< what was meant to be used and was not
};

/// `message`: one line without its end; it lives as long as the call.
using LogHook = std::function<void(LogLevel level, std::string_view message)>;

/// One hook for the process and all its threads; null, as at the start: none. It hears of each
/// kernel that is made, by a MoeLayer, by Selection::create() or by the first fused_experts() with
/// some weights. Each message comes once, however many layers are made alike; setting a hook begins
/// anew. Several threads may call it at once, one that has begun even after another was set. What
/// it throws leaves the call that it was called from. Forwards say nothing.
FUSEDMOE_API void set_log_hook(LogHook hook);

}  // namespace fusedmoe
