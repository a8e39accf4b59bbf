#include "comm/place.h"

#include <unistd.h>

#include <array>

#include "core/check.h"
#include "core/device_runtime.h"

namespace fusedmoe::comm {

void check_place(int rank, int size, std::chrono::milliseconds timeout) {
  constexpr std::chrono::hours kYear(24 * 365);
  FUSEDMOE_CHECK(size >= 1 && rank >= 0 && rank < size, "rank",
                 core::format("{} of {}", rank, size), "at least 0 and below the number of ranks");
  FUSEDMOE_CHECK(timeout.count() > 0 && timeout <= kYear, "timeout",
                 core::format("{} ms", timeout.count()), "positive, at most a year");
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
}

std::string describe_place(const CommunicatorOptions& options) {
  const char* wish = !options.peer_memory ? "maybe" : *options.peer_memory ? "yes" : "no";
  return core::format("{}\n{}\n{}\n{}", host_name(), getpid(),
                      core::runtime_of(options.device).physical_id(options.device), wish);
}

}  // namespace fusedmoe::comm
