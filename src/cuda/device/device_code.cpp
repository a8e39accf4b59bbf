#include "cuda/device/device_code.h"

#include <algorithm>
#include <charconv>

#include "core/format.h"

namespace fusedmoe::cuda {
namespace {

/// One of the architectures.
struct Target {
  DeviceCode code;
  bool of_one_gpu = false;

  explicit Target(std::string_view text) {
    const char* const end = text.data() + text.size();
    const char* rest = std::from_chars(text.data(), end, code.capability).ptr;
    of_one_gpu = rest != end && *rest == 'a';
    code.is_ptx = text.ends_with("-virtual");
  }

  bool runs_on(int capability) const {
    if (of_one_gpu) return capability == code.capability;
    const bool same_major = capability / 10 == code.capability / 10;
    return capability >= code.capability && (code.is_ptx || same_major);
  }
};

/// The driver has nothing to compile of machine code; of both kinds the latest is the best.
bool is_better(const DeviceCode& a, const DeviceCode& b) {
  return a.is_ptx != b.is_ptx ? !a.is_ptx : a.capability > b.capability;
}

}  // namespace

std::string to_string(const DeviceCode& code) {
  return core::format("{} for {}.{}", code.is_ptx ? "PTX" : "machine code", code.capability / 10,
                      code.capability % 10);
}

std::optional<DeviceCode> code_for(std::string_view architectures, int capability) {
  std::optional<DeviceCode> best;
  while (!architectures.empty()) {
    const std::size_t length = std::min(architectures.find(' '), architectures.size());
    const Target target(architectures.substr(0, length));
    architectures.remove_prefix(std::min(length + 1, architectures.size()));
    if (!target.runs_on(capability)) continue;
    if (!best || is_better(target.code, *best)) best = target.code;
  }
  return best;
}

}  // namespace fusedmoe::cuda
