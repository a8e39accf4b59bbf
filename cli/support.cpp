#include "support.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <iterator>
#include <vector>

#include "files/file.h"
#include "files/output.h"
#include "fusedmoe/selection.h"

namespace fusedmoe::cli {

void check_experts_name(const std::string& require) {
  const std::string wanted = require.substr(0, require.find('+'));
  std::vector<std::string> names;
  for (const ExpertsDescriptor* experts : all_experts()) names.emplace_back(experts->name());
  if (require.empty() || std::find(names.begin(), names.end(), wanted) != names.end()) return;
  std::sort(names.begin(), names.end());
  throw UsageError(fmt::format("--experts {}: no such implementation; there are: {}{}", wanted,
                               fmt::join(names, ", "), did_you_mean(wanted, names)));
}

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array kUnits{"B", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1000 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return unit ? fmt::format("{:.1f} {}", value, kUnits[unit]) : fmt::format("{} B", bytes);
}

DType parse_float_dtype(const std::string& text) {
  const auto dtype = parse_dtype(text);
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16) {
    throw Error("--dtype", fmt::format("\"{}\"", text), "f32, bf16 or f16");
  }
  return *dtype;
}

std::string read_text(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad()) files::fail_system(path, "open");
  return text;
}

void write_text(const std::string& path, const std::string& text) {
  files::OutputFile file(path);
  file.write(text);
  file.finish();
}

std::string describe_router(const RouterConfig& router) {
  std::string text =
      fmt::format("{}, top-{} of {}", name(router.scoring), router.topk, router.num_experts);
  if (router.num_zero_experts > 0) {
    text += fmt::format(" and {} zero experts", router.num_zero_experts);
  }
  if (router.num_expert_group > 0) {
    text += fmt::format(", {} groups keep {}", router.num_expert_group, router.topk_group);
  }
  if (router.renormalize) text += ", renormalized";
  if (router.routed_scaling_factor != 1) {
    text += fmt::format(", times {}", router.routed_scaling_factor);
  }
  if (router.apply_router_weight_on_input) text += ", weight on the input";
  return text;
}

double time_ms(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::milli> passed = std::chrono::steady_clock::now() - start;
  return passed.count();
}

}  // namespace fusedmoe::cli
