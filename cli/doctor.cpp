// fusedmoe doctor: what this build finds on this machine.
#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "fusedmoe/tensor.h"
#include "fusedmoe/version.h"
#include "layer/tuned_configs.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

/// Value of the first line "<key> ... : <value>" of a file of /proc; "unknown" when there is none.
std::string proc_value(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    if (begin != std::string::npos) return line.substr(begin);
  }
  return "unknown";
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) ? line : "unknown";
}

std::string experts_names() {
  std::string names;
  for (const auto& experts : all_experts()) {
    names += (names.empty() ? "" : ", ") + std::string(experts->name());
  }
  return names;
}

std::string tuned_configs_text() {
  const std::string path = tuned_configs_path().string();
  if (path.empty()) return "none";
  try {
    // Not tuned_configs(), which is silent about a cached file that cannot be read.
    return std::filesystem::exists(path)
               ? fmt::format("{} in {}", load_tuned_configs(path).all().size(), path)
               : fmt::format("none in {}", path);
  } catch (const Error& error) {
    return error.what();
  }
}

std::vector<std::pair<std::string, std::string>> findings() {
  return {
      {"fusedmoe", FUSEDMOE_VERSION},
      {"compiler", __VERSION__},
      {"processor", proc_value("/proc/cpuinfo", "model name")},
      {"instruction set", std::string(cpu_isa())},
      {"instruction sets", fmt::format("{}", fmt::join(cpu_isas(), ", "))},
      {"threads", fmt::to_string(num_threads())},
      {"memory", proc_value("/proc/meminfo", "MemTotal")},
      {"memory available", proc_value("/proc/meminfo", "MemAvailable")},
      {"huge pages", first_line("/sys/kernel/mm/transparent_hugepage/enabled")},
      {"cuda", cuda_device_summary()},
      {"experts", experts_names()},
      {"tuned configurations", tuned_configs_text()},
  };
}

void run(bool json) {
  nlohmann::ordered_json object;
  for (const auto& [what, value] : findings()) {
    if (json) {
      object[what] = value;
    } else {
      fmt::print("{:<22}{}\n", what, value);
    }
  }
  if (json) fmt::print("{}\n", object.dump());
}

}  // namespace

void add_doctor(Command& program) {
  auto json = std::make_shared<bool>(false);
  Command command = program.add_command(
      "doctor", "Show what this build finds here: instruction set, threads, memory, devices");
  command.add_flag("--json", *json, "Print one JSON object instead of text");
  command.runs([json] { run(*json); });
}

}  // namespace fusedmoe::cli
