#include "checkpoint/quant_rules.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "files/safetensors_header.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {
namespace {

std::size_t count_segments(std::string_view name) {
  return 1 + static_cast<std::size_t>(std::count(name.begin(), name.end(), '.'));
}

}  // namespace

std::string text_of(const ModuleFormat& format) {
  return format.scheme ? name(*format.scheme) : "not quantized";
}

std::string source_of(const ModuleFormat& format) {
  return format.source.empty() ? "config.quantization_config" : format.source;
}

std::size_t ModuleRules::add_format(ModuleFormat format) {
  formats_.push_back(std::move(format));
  return formats_.size() - 1;
}

void ModuleRules::add_name(Names names, std::string name, std::size_t format) {
  while (name.ends_with('.')) name.pop_back();
  if (name.empty()) return;
  NameSet* set = rules_.empty() ? nullptr : std::get_if<NameSet>(&rules_.back());
  if (!set || set->names != names) {
    set = &std::get<NameSet>(rules_.emplace_back(NameSet{names, {}}));
  }
  set->longest = std::max(set->longest, count_segments(name));
  set->formats.emplace(std::move(name), format);
}

void ModuleRules::add_pattern(ModulePattern pattern, std::size_t format, std::string order) {
  rules_.emplace_back(PatternRule{std::move(pattern), format, std::move(order)});
}

void ModuleRules::add_every(std::size_t format, bool linear) {
  rules_.emplace_back(Every{format, linear});
}

std::optional<std::size_t> ModuleRules::NameSet::find(std::string_view module) const {
  const auto format_of = [&](std::string_view name) -> std::optional<std::size_t> {
    const auto found = formats.find(name);
    if (found == formats.end()) return std::nullopt;
    return found->second;
  };
  if (names == Names::kExact) return format_of(module);
  for (std::string_view rest = module;;) {
    std::size_t segments = count_segments(rest);
    for (std::string_view name = rest;; name = name.substr(0, name.rfind('.')), --segments) {
      if (segments <= longest) {
        if (const auto format = format_of(name)) return format;
      }
      if (segments == 1) break;
    }
    const std::size_t dot = rest.find('.');
    if (names == Names::kBelow || dot == std::string_view::npos) return std::nullopt;
    rest.remove_prefix(dot + 1);
  }
}

bool ModuleRules::Lookup::fits(std::size_t rule, const std::string& module) {
  return std::get<PatternRule>(rules_->rules_[rule]).pattern.matches(module, memos_[rule]);
}

ModuleRules::Found ModuleRules::Lookup::find(const std::string& module) {
  const auto& rules = rules_->rules_;
  const auto& formats = rules_->formats_;
  for (std::size_t i = 0; i < rules.size(); ++i) {
    if (const auto* set = std::get_if<NameSet>(&rules[i])) {
      if (const auto format = set->find(module)) return {&formats[*format], true, nullptr, false};
    } else if (const auto* every = std::get_if<Every>(&rules[i])) {
      return {&formats[every->format], false, nullptr, every->linear};
    } else if (fits(i, module)) {
      const auto& first = std::get<PatternRule>(rules[i]);
      const ModuleFormat& format = formats[first.format];
      for (std::size_t k = i + 1; k < rules.size() && !first.order.empty(); ++k) {
        const auto* other = std::get_if<PatternRule>(&rules[k]);
        if (!other || other->order.empty() || other->order > first.order) continue;
        const ModuleFormat& second = formats[other->format];
        if (second.scheme == format.scheme || !fits(k, module)) continue;
        throw Error::unsupported(
            Reason::kQuantScheme, format.source,
            core::format("{} fits {} and says {}, but {} fits it, too, and says {}", format.source,
                         files::quote(module), text_of(format), second.source, text_of(second)));
      }
      return {&format, true, &first.pattern, false};
    }
  }
  return {};
}

}  // namespace fusedmoe::checkpoint
