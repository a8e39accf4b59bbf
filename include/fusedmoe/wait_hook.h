// A program's own say in waits for other ranks.
#pragma once

#include "fusedmoe/export.h"

namespace fusedmoe {

/// Called every few milliseconds by threads that wait for other ranks, so that a program can end
/// their wait: what it throws, of std::exception, ends the communicator and leaves the call. Waits
/// for a stream of a GPU, as that for counts over NCCL, do not call it.
using WaitHook = void (*)();
/// One hook for the process and all its threads; null: none.
FUSEDMOE_API void set_wait_hook(WaitHook hook) noexcept;
/// Calls it, if there is one. To be called by every wait for other ranks, every few milliseconds.
FUSEDMOE_API void call_wait_hook();

}  // namespace fusedmoe
