// Tuned tile plans as a file, and the pin that overrides them.
#include "tools/tune.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "core/check.h"
#include "files/file.h"
#include "files/json.h"
#include "moe/tuning.h"

namespace fusedmoe {
namespace {

using Json = nlohmann::json;

constexpr int kVersion = 1;
constexpr std::size_t kMaxBytes = files::kMaxConfigBytes;
constexpr double kNearest = 2;  // times or part of the tokens

thread_local std::optional<std::string> pinned;

struct TextMember {
  const char* key;
  std::string TunedPlan::*member;
};
constexpr std::array kTexts{TextMember{"device", &TunedPlan::device},
                            TextMember{"experts", &TunedPlan::experts},
                            TextMember{"plan", &TunedPlan::plan}};

struct SizeMember {
  const char* key;
  std::int64_t TunedPlan::*member;
};
constexpr std::array kSizes{
    SizeMember{"hidden", &TunedPlan::hidden}, SizeMember{"intermediate", &TunedPlan::intermediate},
    SizeMember{"num_local_experts", &TunedPlan::num_local_experts},
    SizeMember{"topk", &TunedPlan::topk}, SizeMember{"num_tokens", &TunedPlan::num_tokens}};
constexpr const char* kTime = "time_us";

using Key = std::tuple<std::string_view, std::string_view, std::int64_t, std::int64_t, std::int64_t,
                       std::int64_t, std::int64_t>;

Key key_of(const TunedPlan& plan) {
  return {plan.device, plan.experts,   plan.hidden, plan.intermediate, plan.num_local_experts,
          plan.topk,   plan.num_tokens};
}

bool before(const TunedPlan& plan, const Key& key) {
  return key_of(plan) < key;
}

void check(const TunedPlan& plan, const std::string& label) {
  for (const TextMember& text : kTexts) {
    FUSEDMOE_CHECK(!(plan.*text.member).empty(), core::format("{}.{}", label, text.key), "empty",
                   "a name");
  }
  for (const SizeMember& size : kSizes) {
    FUSEDMOE_CHECK(plan.*size.member >= 1, core::format("{}.{}", label, size.key),
                   core::to_string(plan.*size.member), "at least 1");
  }
  FUSEDMOE_CHECK(std::isfinite(plan.time_us) && plan.time_us >= 0,
                 core::format("{}.{}", label, kTime), core::to_string(plan.time_us),
                 "finite and not negative");
}

/// A member of the type that `is` says; Error naming it otherwise.
const Json& member(const Json& object, const std::string& label, const char* key,
                   bool (Json::*is)() const noexcept, const char* must_be) {
  const auto found = object.find(key);
  FUSEDMOE_CHECK_FILE(found != object.end() && ((*found).*is)(), core::format("{}.{}", label, key),
                      found == object.end() ? "missing" : std::string(found->type_name()), must_be);
  return *found;
}

TunedPlan parse_plan(const Json& object, const std::string& label) {
  constexpr std::size_t kMembers = kTexts.size() + kSizes.size() + 1;
  FUSEDMOE_CHECK_FILE(object.is_object(), label, object.type_name(), "an object");
  TunedPlan plan;
  for (const TextMember& text : kTexts) {
    plan.*text.member =
        member(object, label, text.key, &Json::is_string, "a string").get<std::string>();
  }
  for (const SizeMember& size : kSizes) {
    const Json& value = member(object, label, size.key, &Json::is_number_integer, "an integer");
    // Above the largest signed number it would turn negative, which check() refuses.
    plan.*size.member = value.get<std::int64_t>();
  }
  plan.time_us = member(object, label, kTime, &Json::is_number, "a number").get<double>();
  FUSEDMOE_CHECK_FILE(object.size() == kMembers, label, core::format("{} members", object.size()),
                      core::format("{} members, those of a tuned plan", kMembers));
  check(plan, label);
  return plan;
}

TunedPlans parse_labelled(std::string_view json, const std::string& label) {
  const Json root = files::parse_json_object(json, kMaxBytes, label);
  const Json& version = member(root, label, "version", &Json::is_number_integer, "an integer");
  FUSEDMOE_CHECK_FILE(version == kVersion, label + ".version", version.dump(),
                      core::to_string(kVersion));
  const Json& list = member(root, label, "plans", &Json::is_array, "an array");
  FUSEDMOE_CHECK_FILE(root.size() == 2, label, core::format("{} members", root.size()),
                      "the members version and plans");
  TunedPlans plans;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string name = core::format("{}.plans[{}]", label, i);
    plans.set(parse_plan(list[i], name));
    FUSEDMOE_CHECK_FILE(plans.plans().size() == i + 1, name, "for the problem of an earlier one",
                        "for another problem");
  }
  return plans;
}

/// How many times the smaller one the larger one is.
double distance(std::int64_t a, std::int64_t b) {
  return static_cast<double>(std::max(a, b)) / static_cast<double>(std::min(a, b));
}

}  // namespace

PinnedTilePlan::PinnedTilePlan(std::string name) : outer_(std::move(pinned)) {
  pinned = std::move(name);
}
PinnedTilePlan::~PinnedTilePlan() {
  pinned = std::move(outer_);
}

TunedPlans TunedPlans::parse(std::string_view json) {
  return parse_labelled(json, "tuned plans");
}

TunedPlans TunedPlans::load(const std::filesystem::path& path) {
  return parse_labelled(files::read_text(path, kMaxBytes), path.string());
}

std::string TunedPlans::json() const {
  // One line for each plan, to be read and compared by people.
  std::string text = core::format("{{\n  \"version\": {},\n  \"plans\": [", kVersion);
  const char* separator = "\n";
  for (const TunedPlan& plan : plans_) {
    nlohmann::ordered_json object;
    for (const TextMember& member : kTexts) object[member.key] = plan.*member.member;
    for (const SizeMember& member : kSizes) object[member.key] = plan.*member.member;
    object[kTime] = plan.time_us;
    text += core::format("{}    {}", std::exchange(separator, ",\n"), object.dump());
  }
  return text + "\n  ]\n}\n";
}

void TunedPlans::save(const std::filesystem::path& path) const {
  FUSEDMOE_CHECK(path.has_filename(), "tuned plans", core::format("\"{}\"", path.string()),
                 "the path of a file");
  std::error_code failure;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), failure);
  const std::filesystem::path temporary = files::temporary_name(path);
  files::FileWriter writer(temporary);
  writer.write(json());
  writer.finish();
  files::rename_file(temporary, path);
}

void TunedPlans::set(TunedPlan plan) {
  check(plan, "tuned plan");
  const auto place = std::lower_bound(plans_.begin(), plans_.end(), key_of(plan), before);
  if (place != plans_.end() && key_of(*place) == key_of(plan)) {
    *place = std::move(plan);
  } else {
    plans_.insert(place, std::move(plan));
  }
}

const TunedPlan* TunedPlans::find(std::string_view device, std::string_view experts,
                                  const ProblemSize& problem) const {
  Key key{device,
          experts,
          problem.hidden,
          problem.intermediate,
          problem.num_local_experts,
          problem.topk,
          problem.num_tokens};
  const auto above = std::lower_bound(plans_.begin(), plans_.end(), key, before);
  const TunedPlan* nearest = nullptr;
  const auto consider = [&](const TunedPlan& plan) {
    std::get<6>(key) = plan.num_tokens;
    const double far = distance(plan.num_tokens, problem.num_tokens);
    if (key_of(plan) != key || !(far <= kNearest)) return;
    if (!nearest || far < distance(nearest->num_tokens, problem.num_tokens)) nearest = &plan;
  };
  if (above != plans_.end()) consider(*above);
  if (above != plans_.begin()) consider(*std::prev(above));
  return nearest;
}

std::filesystem::path tuned_plans_path() {
  if (const char* path = std::getenv("FUSEDMOE_TUNED_PLANS")) return path;
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
  return folder / "fusedmoe" / "tuned_plans.json";
}

const TunedPlans& tuned_plans() {
  static const TunedPlans plans = [] {
    const std::filesystem::path path = tuned_plans_path();
    if (path.empty()) return TunedPlans();
    if (std::getenv("FUSEDMOE_TUNED_PLANS")) return TunedPlans::load(path);
    try {
      return TunedPlans::load(path);
    } catch (const Error&) {
      return TunedPlans();
    }
  }();
  return plans;
}

std::optional<std::string_view> core::pinned_tile_plan() {
  if (!pinned) return std::nullopt;
  return *pinned;
}

std::string_view core::preferred_tile_plan(std::string_view device, std::string_view experts,
                                           const ProblemSize& problem) {
  if (pinned) return *pinned;
  const TunedPlan* found = tuned_plans().find(device, experts, problem);
  return found ? std::string_view(found->plan) : std::string_view();
}

}  // namespace fusedmoe
