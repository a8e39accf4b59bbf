#include "fusedmoe/tensor.h"

#include <omp.h>

#include <atomic>
#include <charconv>

#include "core/check.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe {
namespace {

std::atomic<int> requested_threads{0};

/// What OpenMP would use by itself: OMP_NUM_THREADS, else the cores this process may run on.
int default_threads() {
  static const int threads = omp_get_max_threads();
  return threads;
}

}  // namespace

std::string to_string(Device device) {
  return device.is_cpu() ? "cpu" : core::format("cuda:{}", device.index);
}

Device parse_device(std::string_view text) {
  if (text == "cpu") return {};
  if (text == "cuda") return {DeviceKind::kCuda, 0};
  constexpr std::string_view kPrefix = "cuda:";
  if (text.starts_with(kPrefix)) {
    const char* begin = text.data() + kPrefix.size();
    const char* end = text.data() + text.size();
    unsigned short index = 0;
    const auto [stop, error] = std::from_chars(begin, end, index);
    if (error == std::errc() && stop == end) return {DeviceKind::kCuda, index};
  }
  throw Error("device", core::format("\"{}\"", text), "cpu, cuda or cuda:<index>");
}

void set_num_threads(int num_threads) {
  constexpr int kMaxThreads = 4096;
  FUSEDMOE_CHECK(num_threads >= 0 && num_threads <= kMaxThreads, "num_threads",
                 core::to_string(num_threads),
                 core::format("in [1, {}], or 0 for the default", kMaxThreads));
  const int otherwise = default_threads();
  requested_threads = num_threads;
  // For parallel regions of this thread that name no number themselves.
  omp_set_num_threads(num_threads ? num_threads : otherwise);
}

int num_threads() {
  const int requested = requested_threads;
  return requested ? requested : default_threads();
}

}  // namespace fusedmoe
