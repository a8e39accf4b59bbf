#include "checkpoint/layer_formats.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "core/check.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {
namespace {

// What models put before the layer's number, in their files or in memory.
constexpr std::array<std::string_view, 4> kOtherPrefixes{
    "model.layers.", "language_model.model.layers.", "model.language_model.layers.", "layers."};

/// "3." of "model.layers.3."; the first layer of a file whose names have no prefix.
std::string layer_number(std::string_view prefix) {
  if (prefix.empty()) return "0.";
  const std::size_t dot = prefix.substr(0, prefix.size() - 1).rfind('.');
  return std::string(prefix.substr(dot == std::string_view::npos ? 0 : dot + 1));
}

Error mixture_of(const std::string& module, const ModuleFormat& format, const std::string& other,
                 const ModuleFormat& other_format, std::string_view rule) {
  const bool one = format.source == other_format.source || other_format.source.empty();
  const std::string sources = one ? format.source
                              : format.source.empty()
                                  ? other_format.source
                                  : core::format("{} and {}", format.source, other_format.source);
  return Error::unsupported(
      Reason::kQuantScheme, sources,
      core::format("{} say{} that {} is {} and {} is {}: {}", sources, one ? "s" : "", module,
                   text_of(format), other, text_of(other_format), rule));
}

constexpr std::string_view kOneFormat =
    "the experts of a layer must have one format, and so must gate and up";

std::optional<QuantKey> activations_of(const ModuleFormat& format) {
  return format.scheme ? format.scheme->activations : std::nullopt;
}

}  // namespace

LayerModules::LayerModules(const QuantRules& rules, const FamilyRow& row, const std::string& prefix,
                           const BlockLayout& layout)
    : rules_(&rules),
      formats_(rules.formats),
      transforms_(rules.transforms.begin(), rules.transforms.end()),
      own_{prefix, layout.block, layout.experts} {
  const std::string number = layer_number(prefix);
  if (prefix.empty()) own_.prefix = row.prefix + number;
  naming_ = own_;
  const int parts = static_cast<int>(patterns(*layout.experts).size());
  int most = names_in_rules(own_);
  std::vector<std::string> prefixes{own_.prefix, row.prefix + number};
  for (const std::string_view other : kOtherPrefixes)
    prefixes.push_back(std::string(other) + number);
  for (const std::string& other : prefixes) {
    for (const std::string& block : row.blocks) {
      for (const ExpertLayout& experts : row.layouts) {
        if (most == parts) return;
        // Quantizers know linear layers; a stack is named as the file has it.
        if (&experts != own_.experts && experts.storage != ExpertStorage::kPerExpert) continue;
        const Naming naming{other, block, &experts};
        const int count = names_in_rules(naming);
        if (count <= most) continue;
        most = count;
        naming_ = naming;
        renamed_ = true;
      }
    }
  }
}

std::vector<std::string> LayerModules::patterns(const ExpertLayout& layout) {
  std::vector<std::string> result{layout.w1};
  if (!layout.w3.empty()) result.push_back(layout.w3);
  result.push_back(layout.w2);
  return result;
}

std::string LayerModules::module_name(const Naming& naming, const std::string& pattern,
                                      std::int64_t expert) {
  return naming.prefix + tensor_name(naming.block, pattern, expert);
}

void LayerModules::use_names_of_file() {
  naming_ = own_;
  renamed_ = false;
}

int LayerModules::names_in_rules(const Naming& naming) {
  const std::vector<std::string> names = patterns(*naming.experts),
                                 own_names = patterns(*own_.experts);
  int count = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string module = module_name(naming, names[i], 0);
    const bool same = names.size() == own_names.size();
    const bool down = i + 1 == names.size();
    const std::string in_file = module_name(own_,
                                            own_names[same   ? i
                                                      : down ? own_names.size() - 1
                                                             : 0],
                                            0);
    const auto is_named = [&](ModuleRules::Lookup& rules) {
      const ModuleRules::Found found = rules.find(module);
      return found.named &&
             (module == in_file || !found.pattern || found.pattern->tells_from(in_file));
    };
    bool named = is_named(formats_);
    for (ModuleRules::Lookup& transform : transforms_) named |= is_named(transform);
    count += named;
  }
  return count;
}

const ModuleFormat& LayerModules::find(const std::string& module) {
  static const ModuleFormat kPlain;
  check_transforms(module);
  const ModuleRules::Found found = formats_.find(module);
  if (!found.format) return kPlain;
  if (found.format->refusal) throw Error(*found.format->refusal);
  return *found.format;
}

void LayerModules::check_transforms(const std::string& module) {
  for (ModuleRules::Lookup& transform : transforms_) {
    const ModuleRules::Found found = transform.find(module);
    if (found.format && found.format->refusal) throw Error(*found.format->refusal);
  }
}

std::vector<std::string> LayerModules::modules(std::int64_t expert) const {
  std::vector<std::string> result;
  for (const std::string& pattern : patterns(*naming_.experts)) {
    result.push_back(module_name(naming_, pattern, expert));
  }
  return result;
}

std::vector<std::string> LayerModules::modules_without_numbers() const {
  std::vector<std::string> result;
  for (std::string pattern : patterns(*naming_.experts)) {
    if (const std::size_t at = pattern.find(".*"); at != pattern.npos) pattern.erase(at, 2);
    result.push_back(module_name(naming_, pattern, 0));
  }
  return result;
}

ExpertFormats LayerModules::formats_of(const std::vector<std::string>& modules) {
  ExpertFormats formats{find(modules.front()), find(modules.back())};
  const ModuleFormat& up = find(modules[modules.size() - 2]);
  if (up.scheme != formats.first.scheme) {
    throw mixture_of(modules.front(), formats.first, modules[1], up, kOneFormat);
  }
  formats.linear = formats_.find(modules.front()).linear && formats_.find(modules.back()).linear;
  if (activations_of(formats.first) != activations_of(formats.down)) {
    throw mixture_of(modules.front(), formats.first, modules.back(), formats.down,
                     "the inputs of all matrices of a layer's experts must have one format");
  }
  return formats;
}

ExpertFormats LayerModules::experts(std::int64_t num_experts) {
  const std::vector<std::string> firsts = modules(0);
  std::optional<ModuleFormat> first_of[3];
  std::optional<Error> mixture;
  for (std::int64_t e = 0; e < num_experts && !mixture; ++e) {
    const std::vector<std::string> names = e == 0 ? firsts : modules(e);
    for (std::size_t i = 0; i < names.size() && !mixture; ++i) {
      const ModuleFormat& format = find(names[i]);
      if (!first_of[i]) first_of[i] = format;
      if (format.scheme == first_of[i]->scheme) continue;
      mixture = mixture_of(firsts[i], *first_of[i], names[i], format, kOneFormat);
    }
  }
  if (!mixture) return formats_of(firsts);
  if (!rules_->without_numbers) throw Error(*mixture);
  ExpertFormats formats = formats_of(modules_without_numbers());
  formats.mixture = std::move(mixture);
  return formats;
}

const ModuleFormat& LayerModules::beside(const std::string& layer) {
  return find(naming_.prefix + layer);
}

std::optional<QuantScheme> configured_scheme(const ModelConfig& model) {
  if (!model.quantization) return std::nullopt;
  const FamilyRow& row = family_row(model.family);
  const auto per_expert = std::find_if(
      row.layouts.begin(), row.layouts.end(),
      [](const ExpertLayout& layout) { return layout.storage == ExpertStorage::kPerExpert; });
  const ExpertLayout& experts = per_expert == row.layouts.end() ? row.layouts.front() : *per_expert;
  const BlockLayout layout = published_names(model, experts);
  std::optional<Error> problem;
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer) {
    try {
      LayerModules modules(*model.quantization, row, core::format("{}{}.", row.prefix, layer),
                           layout);
      const ExpertFormats formats = modules.experts(1);
      if (!formats.first.scheme && !formats.down.scheme) continue;
      QuantScheme scheme = formats.first.scheme.value_or(model.scheme);
      const QuantScheme down = formats.down.scheme.value_or(model.scheme);
      if (down.weights != scheme.weights) scheme.down = down.weights;
      return scheme;
    } catch (const Error& error) {
      if (!problem) problem = error;
    }
  }
  if (problem) throw Error(*problem);
  return std::nullopt;
}

}  // namespace fusedmoe::checkpoint
