#include "layer/tuned_configs.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "files/file.h"
#include "files/json.h"
#include "files/output.h"

namespace fusedmoe {
namespace {

using Json = nlohmann::json;

constexpr int kVersion = 2;  // 1 had no scheme
constexpr std::size_t kMaxBytes = std::size_t{4} << 20;

struct TunedText {
  const char* key;
  std::string TunedConfig::*member;
};
constexpr std::array kTexts{
    TunedText{"device", &TunedConfig::device}, TunedText{"experts", &TunedConfig::experts},
    TunedText{"scheme", &TunedConfig::scheme}, TunedText{"config", &TunedConfig::config}};

struct SizeMember {
  const char* key;
  std::int64_t TunedConfig::*member;
};
constexpr std::array kSizes{SizeMember{"hidden", &TunedConfig::hidden},
                            SizeMember{"intermediate", &TunedConfig::intermediate},
                            SizeMember{"num_local_experts", &TunedConfig::num_local_experts},
                            SizeMember{"topk", &TunedConfig::topk},
                            SizeMember{"num_tokens", &TunedConfig::num_tokens}};
constexpr const char *kTime = "time_us", *kMeasuredBy = "measured_by", *kReport = "report";

/// A member of the type that `is` says; Error naming it otherwise.
const Json& member(const Json& object, const std::string& label, const char* key,
                   bool (Json::*is)() const noexcept, const char* must_be) {
  const auto found = object.find(key);
  FUSEDMOE_CHECK_FILE(found != object.end() && ((*found).*is)(), core::format("{}.{}", label, key),
                      found == object.end() ? "missing" : std::string(found->type_name()), must_be);
  return *found;
}

TunedConfig parse_config(const Json& object, const std::string& label) {
  constexpr std::size_t kMembers = kTexts.size() + kSizes.size() + 1;
  FUSEDMOE_CHECK_FILE(object.is_object(), label, object.type_name(), "an object");
  TunedConfig config;
  for (const TunedText& text : kTexts) {
    config.*text.member =
        member(object, label, text.key, &Json::is_string, "a string").get<std::string>();
  }
  for (const SizeMember& size : kSizes) {
    const Json& value = member(object, label, size.key, &Json::is_number_integer, "an integer");
    // Above the largest signed number it would turn negative, which set() refuses.
    config.*size.member = value.get<std::int64_t>();
  }
  config.time_us = member(object, label, kTime, &Json::is_number, "a number").get<double>();
  const bool of_report = object.contains(kMeasuredBy);
  if (of_report) {
    config.measured_by =
        member(object, label, kMeasuredBy, &Json::is_string, "a string").get<std::string>();
  }
  FUSEDMOE_CHECK_FILE(object.size() == kMembers + of_report, label,
                      core::format("{} members", object.size()),
                      core::format("{} members, those of a tuned configuration", kMembers));
  return config;
}

TunedConfigs parse_labelled(std::string_view json, const std::string& label) {
  const Json root = files::parse_json_object(json, kMaxBytes, label);
  const Json& version = member(root, label, "version", &Json::is_number_integer, "an integer");
  FUSEDMOE_CHECK_FILE(version == kVersion, label + ".version", version.dump(),
                      core::to_string(kVersion));
  const Json& list = member(root, label, "configs", &Json::is_array, "an array");
  const bool is_report = root.contains(kReport);
  if (is_report) member(root, label, kReport, &Json::is_object, "an object");
  FUSEDMOE_CHECK_FILE(root.size() == 2U + is_report, label, core::format("{} members", root.size()),
                      "the members version and configs");
  TunedConfigs configs;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string name = core::format("{}.configs[{}]", label, i);
    TunedConfig config = parse_config(list[i], name);
    try {
      configs.set(std::move(config));
    } catch (const Error& error) {
      throw error.within(name);
    }
    FUSEDMOE_CHECK_IO(configs.all().size() == i + 1, name,
                      core::format("{} is for the problem of an earlier one", name));
  }
  return configs;
}

}  // namespace

TunedConfigs parse_tuned_configs(std::string_view json) {
  return parse_labelled(json, "tuned configurations");
}

TunedConfigs load_tuned_configs(const std::filesystem::path& path) {
  return parse_labelled(files::read_text(path, kMaxBytes), path.string());
}

std::string to_json(const TunedConfigs& configs, std::string_view report) {
  // One line for each, to be read and compared by people.
  std::string text = core::format("{{\n  \"version\": {},\n  \"configs\": [", kVersion);
  const char* separator = "\n";
  for (const TunedConfig& config : configs.all()) {
    nlohmann::ordered_json object;
    for (const TunedText& member : kTexts) object[member.key] = config.*member.member;
    for (const SizeMember& member : kSizes) object[member.key] = config.*member.member;
    object[kTime] = config.time_us;
    if (!config.measured_by.empty()) object[kMeasuredBy] = config.measured_by;
    text += core::format("{}    {}", std::exchange(separator, ",\n"), object.dump());
  }
  text += "\n  ]";
  if (!report.empty()) text += core::format(",\n  \"{}\": {}", kReport, report);
  return text + "\n}\n";
}

void save_tuned_configs(const TunedConfigs& configs, const std::filesystem::path& path,
                        std::string_view report) {
  FUSEDMOE_CHECK(path.has_filename(), "tuned configurations", core::format("\"{}\"", path.string()),
                 "the path of a file");
  std::error_code failure;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), failure);
  files::OutputFile file(path);
  file.write(to_json(configs, report));
  file.finish();
}

std::filesystem::path tuned_configs_path() {
  if (const char* path = std::getenv("FUSEDMOE_TUNED_CONFIGS")) return path;
  std::filesystem::path folder;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  if (cache && *cache) {
    folder = cache;
  } else if (home && *home) {
    folder = std::filesystem::path(home) / ".cache";
  } else {
    return {};
  }
  return folder / "fusedmoe" / "tuned_configs.json";
}

const TunedConfigs& tuned_configs() {
  static const TunedConfigs configs = [] {
    const std::filesystem::path path = tuned_configs_path();
    if (path.empty()) return TunedConfigs();
    if (std::getenv("FUSEDMOE_TUNED_CONFIGS")) return load_tuned_configs(path);
    try {
      return load_tuned_configs(path);
    } catch (const Error& error) {
      std::error_code failure;
      if (std::filesystem::exists(path, failure)) {
        core::log(
            LogLevel::kWarning,
            core::format("kernel configurations that were tuned are not used: {}", error.what()));
      }
      return TunedConfigs();
    }
  }();
  return configs;
}

}  // namespace fusedmoe
