#include "cuda/nccl/connecting.h"

#include <algorithm>
#include <vector>

#include "core/exception_text.h"
#include "core/format.h"
#include "fusedmoe/error.h"

namespace fusedmoe::cuda {

using std::chrono::milliseconds;

void Connecting::check() {
  control_.check_failure();
  if (const auto text = control_.read(name_ + "/failed", milliseconds(0))) {
    throw Error::communication(*text);
  }
}

std::optional<std::string> Connecting::read(const std::string& text, Clock::time_point deadline) {
  constexpr milliseconds kLook{20};
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    auto found = control_.read(text, std::clamp(left, milliseconds(0), kLook));
    if (found || left <= milliseconds(0)) return found;
    check();
  }
}

void Connecting::meet(std::string_view point) {
  check();
  const auto at = [&](int rank) { return core::format("{}/{}/{}", name_, point, rank); };
  control_.post(at(rank_), "here");
  const auto deadline = Clock::now() + timeout_;
  std::vector<int> late;
  for (int r = 0; r < size_; ++r) {
    if (!read(at(r), deadline)) late.push_back(r);
  }
  if (late.empty()) return;
  throw Error::communication(
      core::format("{} {} did not arrive within {} s", late.size() == 1 ? "rank" : "ranks",
                   core::join(late, ", "), static_cast<double>(timeout_.count()) / 1000));
}

void Connecting::fail() {
  const std::string failed = name_ + "/failed";
  std::string text = core::format("{}: rank {}: {}", name_, rank_, core::current_exception_text());
  try {
    control_.post(failed, text);
    text = control_.read(failed, milliseconds(0)).value_or(text);
  } catch (...) {
    // The others notice by themselves that the control plane is gone.
  }
  throw Error::communication(text);
}

}  // namespace fusedmoe::cuda
