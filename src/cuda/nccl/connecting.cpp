#include "cuda/nccl/connecting.h"

#include <algorithm>
#include <vector>

#include "core/exception_text.h"
#include "core/format.h"

namespace fusedmoe::cuda {

using std::chrono::milliseconds;

void Connecting::check() {
  // Before the failure that a rank may make of it.
  if (const auto text = control_.read(name_ + "/failed", milliseconds(0))) {
    throw Error::communication(*text);
  }
  control_.check_failure();
}

std::optional<std::string> Connecting::read(const std::string& text) {
  constexpr milliseconds kLook{20};
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline_ - Clock::now());
    auto found = control_.read(text, std::clamp(left, milliseconds(0), kLook));
    if (found || left <= milliseconds(0)) return found;
    check();
  }
}

void Connecting::meet(std::string_view point) {
  check();
  const auto at = [&](int rank) { return core::format("{}/{}/{}", name_, point, rank); };
  control_.post(at(rank_), "here");
  std::vector<int> late;
  for (int r = 0; r < size_; ++r) {
    if (!read(at(r))) late.push_back(r);
  }
  check();  // a rank whose text is here may have waited for another one in vain
  if (late.empty()) return;
  throw Error::communication(
      core::format("{} {} did not arrive within {} s", late.size() == 1 ? "rank" : "ranks",
                   core::join(late, ", "), static_cast<double>(timeout_.count()) / 1000));
}

std::string Connecting::fail() {
  const std::string failed = name_ + "/failed";
  std::string text = core::format("{}: rank {}: {}", name_, rank_, core::current_exception_text());
  try {
    auto first = control_.read(failed, milliseconds(0));
    if (!first) first = control_.read("failure", milliseconds(0));
    if (!first) {
      control_.post(failed, text);
      first = control_.read(failed, milliseconds(0));
    }
    return first.value_or(text);
  } catch (...) {
    // The others notice by themselves that the control plane is gone.
    return text;
  }
}

}  // namespace fusedmoe::cuda
