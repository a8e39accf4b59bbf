#include "core/log.h"

#include <memory>
#include <mutex>
#include <set>
#include <utility>

namespace fusedmoe {
namespace {

struct Listener {
  std::shared_ptr<const LogHook> hook;
  std::set<std::string> heard;
  std::mutex mutex;  // not held while the hook runs, which may set another

  static Listener& instance() {
    static auto* const listener = new Listener;  // threads may outlive static objects
    return *listener;
  }
};

}  // namespace

void set_log_hook(LogHook hook) {
  Listener& listener = Listener::instance();
  auto next = hook ? std::make_shared<const LogHook>(std::move(hook)) : nullptr;
  const std::lock_guard lock(listener.mutex);
  listener.hook.swap(next);
  listener.heard.clear();
}

bool core::has_log_hook() {
  Listener& listener = Listener::instance();
  const std::lock_guard lock(listener.mutex);
  return listener.hook != nullptr;
}

void core::log(LogLevel level, const std::string& message) {
  Listener& listener = Listener::instance();
  std::shared_ptr<const LogHook> hook;
  {
    const std::lock_guard lock(listener.mutex);
    if (!listener.hook || !listener.heard.insert(message).second) return;
    hook = listener.hook;
  }
  (*hook)(level, message);
}

}  // namespace fusedmoe
