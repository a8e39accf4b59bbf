#include "fusedmoe/tensor.h"

#include <charconv>

#include "core/check.h"

namespace fusedmoe {
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

}  // namespace fusedmoe
