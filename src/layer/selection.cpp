// The registry, and the choice: every pair answers the configuration, the first "yes" is taken.
#include "fusedmoe/selection.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "cpu/experts.h"
#include "cuda/experts.h"
#include "fusedmoe/runtime.h"
#include "layer/monolithic.h"
#include "reference/experts.h"

namespace fusedmoe {
namespace {

using ExpertsList = std::vector<std::shared_ptr<const Experts>>;

/// A backend's experts: standard, batched, and the two that are chosen on demand only.
template <typename Make, typename MakeUnfused>
void add_backend(ExpertsList& list, const Make& make, const MakeUnfused& make_unfused) {
  std::shared_ptr<const ModularExperts> standard = make(ActivationFormat::kStandard);
  list.push_back(standard);
  list.push_back(make(ActivationFormat::kBatchedExperts));
  list.push_back(make_monolithic(std::move(standard)));
  list.push_back(make_unfused());
}

/// Those of a build with CUDA, and adapters for all that can have one.
void add_cuda(ExpertsList& list) {
  const ExpertsList experts = cuda::make_all_experts();
  list.insert(list.end(), experts.begin(), experts.end());
  for (const auto& each : experts) {
    const bool standard = each->activation_format() == ActivationFormat::kStandard &&
                          each->weight_and_reduce() == WeightAndReduce::kNoOp;
    if (each->is_monolithic() || each->has_hooks() || !standard) continue;
    list.push_back(make_monolithic(std::static_pointer_cast<const ModularExperts>(each)));
  }
}

ExpertsList make_all_experts() {
  ExpertsList list;
  add_backend(list, cpu::make_experts, cpu::make_unfused_experts);
  add_cuda(list);
  add_backend(list, reference::make_experts, reference::make_unfused_experts);
  return list;
}

Support pair_support(const MoeConfig& config, const PrepareAndFinalize& prepare_finalize,
                     const Experts& experts) {
  if (const std::string problem = device_problem(config.device); !problem.empty()) {
    return Support::no(Reason::kDevice, core::format("{}: {}", to_string(config.device), problem));
  }
  if (config.hooks && !experts.has_hooks()) {
    return Support::no(Reason::kHooks, core::format("{} has no injection points", experts.name()));
  }
  const ActivationFormat format = experts.activation_format();
  if (prepare_finalize.activation_format() != format) {
    return Support::no(Reason::kPairing,
                       core::format("{} experts, {} prepare/finalize", name(format),
                                    name(prepare_finalize.activation_format())));
  }
  // The wish is compared below; an implementation is asked about what it would have to do.
  MoeConfig asked = config;
  asked.activation_format = format;
  if (Support support = experts.supports(asked); !support) return support;
  if (Support support = prepare_finalize.supports(asked); !support) return support;
  if (!config.device.is_cpu() && make_preparation(experts, config.scheme, false).quant) {
    return Support::no(Reason::kQuantScheme,
                       core::format("{}: {} quantizes activations on the cpu only",
                                    name(config.scheme), prepare_finalize.name()));
  }
  if (!prepare_finalize.accepts(experts.weight_and_reduce())) {
    return Support::no(Reason::kPairing,
                       core::format("{} cannot finalize \"{}\"", prepare_finalize.name(),
                                    name(experts.weight_and_reduce())));
  }
  if (config.activation_format != format) {
    return Support::no(Reason::kActivationFormat, core::format("{}: {} is asked for", name(format),
                                                               name(config.activation_format)));
  }
  return Support::yes();
}

std::vector<Candidate> make_candidates(const MoeConfig& config) {
  std::vector<Candidate> candidates;
  for (const auto& experts : all_experts()) {
    for (const auto& prepare_finalize : all_prepare_finalize()) {
      candidates.push_back(
          {prepare_finalize, experts, pair_support(config, *prepare_finalize, *experts), false});
    }
  }
  std::stable_partition(candidates.begin(), candidates.end(), [](const Candidate& candidate) {
    return candidate.prepare_finalize->activation_format() ==
           candidate.experts->activation_format();
  });
  return candidates;
}

void choose(Selection& selection, Candidate& candidate) {
  candidate.chosen = true;
  selection.prepare_finalize = candidate.prepare_finalize;
  selection.experts = candidate.experts;
}

template <typename Implementations>
std::string list_names(const Implementations& implementations) {
  std::string names;
  for (const auto& implementation : implementations) {
    if (!names.empty()) names += ", ";
    names += implementation->name();
  }
  return names;
}

template <typename Implementations>
auto find_by_name(const Implementations& implementations, std::string_view wanted,
                  const char* argument) {
  for (const auto& implementation : implementations) {
    if (implementation->name() == wanted) return implementation;
  }
  throw Error::unknown_name(argument, wanted, list_names(implementations));
}

Selection select_required(MoeConfig config, std::string_view require) {
  const std::size_t plus = require.find('+');
  const auto experts = find_by_name(all_experts(), require.substr(0, plus), "require");
  std::shared_ptr<const PrepareAndFinalize> prepare_finalize;
  if (plus != std::string_view::npos) {
    prepare_finalize = find_by_name(all_prepare_finalize(), require.substr(plus + 1), "require");
  }
  config.activation_format = experts->activation_format();

  Selection selection;
  selection.config = config;
  selection.candidates = make_candidates(config);
  const Candidate* refused = nullptr;
  for (Candidate& candidate : selection.candidates) {
    if (candidate.experts != experts) continue;
    if (prepare_finalize && candidate.prepare_finalize != prepare_finalize) continue;
    if (candidate.support) {
      choose(selection, candidate);
      return selection;
    }
    // Pairs that fit come first: their reason says more than a mismatch of formats.
    if (!refused) refused = &candidate;
  }
  throw Error::unsupported(refused->support.reason, "require",
                           core::format("{}+{} cannot serve this: {} ({})",
                                        refused->experts->name(), refused->prepare_finalize->name(),
                                        refused->support.text, code(refused->support.reason)));
}

std::string describe(const MoeConfig& config) {
  return core::format("{} experts, topk {}, hidden {}, intermediate {}, {}, {}, {} on {}",
                      config.num_experts, config.topk, config.hidden, config.intermediate,
                      name(config.scheme), name(config.activation), name(config.dtype),
                      to_string(config.device));
}

}  // namespace

std::span<const std::shared_ptr<const PrepareAndFinalize>> all_prepare_finalize() {
  static const std::array<std::shared_ptr<const PrepareAndFinalize>, 2> list{make_no_ep(),
                                                                             make_batched()};
  return list;
}

std::span<const std::shared_ptr<const Experts>> all_experts() {
  static const ExpertsList list = make_all_experts();
  return list;
}

Selection explain(const MoeConfig& config) {
  Selection selection;
  selection.config = config;
  selection.candidates = make_candidates(config);
  const auto first =
      std::find_if(selection.candidates.begin(), selection.candidates.end(),
                   [](const Candidate& candidate) { return static_cast<bool>(candidate.support); });
  if (first != selection.candidates.end()) choose(selection, *first);
  return selection;
}

Selection select(const MoeConfig& config, std::string_view require) {
  if (!require.empty()) return select_required(config, require);
  Selection selection = explain(config);
  if (selection) return selection;
  throw Error::unsupported(
      selection.candidates.front().support.reason, "config",
      core::format("no implementation serves {}:\n{}", describe(config), selection.table()));
}

std::string Selection::table() const {
  using Row = std::array<std::string, 6>;
  std::vector<Row> rows{{"", "experts", "prepare_finalize", "format", "code", "reason"}};
  for (const Candidate& candidate : candidates) {
    rows.push_back({candidate.chosen ? "*" : "", std::string(candidate.experts->name()),
                    std::string(candidate.prepare_finalize->name()),
                    std::string(name(candidate.experts->activation_format())),
                    std::string(code(candidate.support.reason)), candidate.support.text});
  }
  std::array<std::size_t, 6> widths{};
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += core::format("{:<{}}  ", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

std::string Selection::json() const {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const Candidate& candidate : candidates) {
    nlohmann::ordered_json row;
    row["chosen"] = candidate.chosen;
    row["experts"] = candidate.experts->name();
    row["prepare_finalize"] = candidate.prepare_finalize->name();
    row["activation_format"] = name(candidate.experts->activation_format());
    row["monolithic"] = candidate.experts->is_monolithic();
    row["supported"] = static_cast<bool>(candidate.support);
    row["code"] = code(candidate.support.reason);
    row["reason"] = candidate.support.text;
    rows.push_back(std::move(row));
  }
  return rows.dump(2);
}

}  // namespace fusedmoe
