// Plans: a selection as JSON, and pinned.

#include <array>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "layer/checks.h"

namespace fusedmoe {
namespace {

using OrderedJson = nlohmann::ordered_json;

struct TextMember {
  const char* key;
  std::string Plan::*member;
  bool required;
};
constexpr std::array<TextMember, 9> kTextMembers{{
    {"experts", &Plan::experts, true},
    {"prepare_finalize", &Plan::prepare_finalize, true},
    {"scheme", &Plan::scheme, true},
    {"dtype", &Plan::dtype, true},
    {"device", &Plan::device, true},
    {"isa", &Plan::isa, true},
    {"shared_experts", &Plan::shared_experts, false},
    {"shared_scheme", &Plan::shared_scheme, false},
    {"rows_travel", &Plan::rows_travel, false},
}};
constexpr const char* kLayoutVersion = "layout_version";

OrderedJson parse_object(std::string_view text) {
  OrderedJson object = OrderedJson::parse(text, nullptr, /*allow_exceptions=*/false);
  FUSEDMOE_CHECK(object.is_object(), "plan",
                 object.is_discarded() ? "not JSON" : std::string(object.type_name()),
                 "a JSON object");
  return object;
}

void check_keys(const OrderedJson& object) {
  for (const auto& item : object.items()) {
    bool known = item.key() == kLayoutVersion;
    for (const TextMember& member : kTextMembers) known = known || item.key() == member.key;
    if (!known) {
      throw Error::invalid("plan",
                           core::format("plan has a member \"{}\", which no plan has", item.key()));
    }
  }
}

}  // namespace

std::string Plan::json() const {
  OrderedJson object;
  for (const TextMember& member : kTextMembers) {
    const std::string& value = this->*member.member;
    if (member.required || !value.empty()) object[member.key] = value;
  }
  object[kLayoutVersion] = layout_version;
  return object.dump(2);
}

Plan Plan::parse(std::string_view json) {
  const OrderedJson object = parse_object(json);
  check_keys(object);
  Plan plan;
  for (const TextMember& member : kTextMembers) {
    const auto found = object.find(member.key);
    if (found == object.end() && !member.required) continue;
    FUSEDMOE_CHECK(found != object.end() && found->is_string(), core::format("plan.{}", member.key),
                   found == object.end() ? "missing" : found->dump(), "a string");
    plan.*member.member = found->get<std::string>();
  }
  const auto version = object.find(kLayoutVersion);
  FUSEDMOE_CHECK(version != object.end() && version->is_number_integer(),
                 core::format("plan.{}", kLayoutVersion),
                 version == object.end() ? "missing" : version->dump(), "an integer");
  plan.layout_version = version->get<int>();
  return plan;
}

Plan Selection::plan() const {
  layer::check_chosen(*this);
  Plan plan;
  plan.experts = experts->name();
  plan.prepare_finalize = prepare_finalize->name();
  plan.scheme = name(config.scheme);
  plan.dtype = name(config.dtype);
  plan.device = to_string(config.device);
  plan.isa = experts->instruction_set();
  plan.layout_version = experts->layout_version();
  return plan;
}

Selection select(const MoeConfig& config, const Plan& plan) {
  Selection selection = select(config, core::format("{}+{}", plan.experts, plan.prepare_finalize));
  const Plan now = selection.plan();
  for (const TextMember& member : kTextMembers) {
    if (!member.required) continue;
    FUSEDMOE_CHECK(plan.*member.member == now.*member.member, core::format("plan.{}", member.key),
                   core::format("\"{}\"", plan.*member.member),
                   core::format("\"{}\", as it is here", now.*member.member));
  }
  FUSEDMOE_CHECK(plan.layout_version == now.layout_version, core::format("plan.{}", kLayoutVersion),
                 core::to_string(plan.layout_version),
                 core::format("{}, as it is here", now.layout_version));
  return selection;
}

}  // namespace fusedmoe
