// The functions that every control plane has, whatever its store. A rank that gives up posts its
// reason under the name "failure". All other ranks look for that text while they wait.
#include <algorithm>
#include <atomic>

#include "comm/poll.h"
#include "core/format.h"
#include "fusedmoe/error.h"
#include "fusedmoe/wait_hook.h"

namespace fusedmoe {

namespace {

std::atomic<WaitHook> wait_hook{nullptr};

}  // namespace

void set_wait_hook(WaitHook hook) noexcept {
  wait_hook = hook;
}

void call_wait_hook() {
  if (const WaitHook hook = wait_hook) hook();
}

void ControlPlane::forget(const std::string&) {}

void ControlPlane::check_failure() {
  if (const auto reason = read("failure", std::chrono::milliseconds(0))) {
    throw Error::communication(*reason);
  }
  call_wait_hook();
}

std::optional<std::string> ControlPlane::read_or_fail(const std::string& name,
                                                      std::chrono::milliseconds timeout) {
  using std::chrono::milliseconds;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    if (auto text = read(name, std::clamp(left, milliseconds(0), comm::kPollInterval))) return text;
    check_failure();
    if (left <= milliseconds(0)) return std::nullopt;
  }
}

namespace comm {

void post_failure(ControlPlane& control, int rank, std::string_view reason) noexcept {
  try {
    control.post("failure", core::format("rank {}: {}", rank, reason));
  } catch (...) {
    // The others notice at their deadlines.
  }
}

}  // namespace comm
}  // namespace fusedmoe
