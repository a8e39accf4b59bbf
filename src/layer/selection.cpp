// The registry, and the choice: every pair answers the configuration, the first "yes" is taken.
#include "fusedmoe/selection.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"
#include "core/log.h"
#include "cpu/experts.h"
#include "cuda/sm80/family.h"
#include "cuda/sm90/family.h"
#include "fusedmoe/runtime.h"
#include "layer/checks.h"
#include "layer/peer_rows.h"
#include "layer/row_choice.h"
#include "layer/tuned_configs.h"
#include "moe/placement.h"
#include "reference/experts.h"

namespace fusedmoe {
namespace {

/// False: leave the pair out of the support table, as it could never work.
bool can_pair(const PrepareFinalizeDescriptor& prepare_finalize, const ExpertsDescriptor& experts) {
  return prepare_finalize.accepts(experts.weight_and_reduce(prepare_finalize.activation_format()));
}

Support pair_support(const MoeConfig& config, const PrepareFinalizeDescriptor& prepare_finalize,
                     const ExpertsDescriptor& experts) {
  // The wish is compared below; an implementation is asked about what it would have to do.
  const ActivationFormat format = prepare_finalize.activation_format();
  MoeConfig asked = config;
  asked.activation_format = format;
  Support runs = experts.supports(asked);
  if (!runs) return runs;
  if (Support support = prepare_finalize.supports(asked); !support) return support;
  if (!config.device.is_cpu() && make_preparation(experts, config.scheme, false).quant) {
    return Support::no(Reason::kQuantScheme,
                       core::format("{}: {} quantizes activations on the cpu only",
                                    name(config.scheme), prepare_finalize.name()));
  }
  if (config.activation_format != format) {
    return Support::no(Reason::kActivationFormat, core::format("{}: {} is asked for", name(format),
                                                               name(config.activation_format)));
  }
  return runs;
}

std::vector<Candidate> make_candidates(const MoeConfig& config) {
  if (config.compute_capability && config.device.is_cpu()) {
    throw Error::conflict("config.compute_capability", "config.device cpu", "a GPU has one");
  }
  std::vector<Candidate> candidates;
  for (const ExpertsDescriptor* experts : all_experts()) {
    for (const PrepareFinalizeDescriptor* prepare_finalize : all_prepare_finalize()) {
      if (!can_pair(*prepare_finalize, *experts)) continue;
      candidates.push_back(
          {prepare_finalize, experts, pair_support(config, *prepare_finalize, *experts), false});
    }
  }
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

std::string describe(const MoeConfig& config) {
  return core::format("{} experts, topk {}, hidden {}, intermediate {}, {}, {}, {} on {}",
                      config.num_experts, config.topk, config.hidden, config.intermediate,
                      name(config.scheme), name(config.activation), name(config.dtype),
                      to_string(config.device));
}

/// Why none of the implementations that come before the chosen one.
std::string passed_over(const Selection& selection) {
  std::string text;
  const ExpertsDescriptor* last = selection.experts;
  for (const Candidate& candidate : selection.candidates) {
    if (candidate.chosen) break;
    if (candidate.experts == selection.experts || candidate.experts == last) continue;
    last = candidate.experts;
    text += core::format("; not {}: {}", last->name(),
                         candidate.support ? "another was asked for" : candidate.support.text);
  }
  return text;
}

/// What was chosen, in one line: "cpu+no_ep runs 8 experts, ... on cpu: isa avx512, 2 threads".
std::string announcement(const Selection& selection, const ModularKernel& kernel) {
  const MoeConfig& config = kernel.experts().config();
  std::string text = core::format("{} runs {}: isa {}", selection.pair(), describe(config),
                                  selection.experts->instruction_set());
  if (config.device.is_cpu()) {
    text += core::format(", {} threads", kernel.experts().context().num_threads);
  }
  const std::pair<bool, const char*> wishes[] = {{config.batch_invariant, "batch invariant"},
                                                 {config.hooks, "with hooks"},
                                                 {config.monolithic, "with the router"},
                                                 {config.has_expert_map, "with an expert map"}};
  for (const auto& [asked, name] : wishes) {
    if (asked) text += core::format(", {}", name);
  }
  const std::string travel = kernel.rows_travel();
  if (!travel.empty()) text += core::format(", rows: {}", travel);
  // Across ranks the rows that arrive decide.
  for (const std::int64_t tokens : {1, 64, 1024}) {
    if (kernel.prepare_finalize().moves_rows()) break;
    const ProblemSize problem = ProblemSize::of(config, tokens);
    const auto configs = kernel.experts().kernel_configs(kernel.sizes(problem).transport.experts);
    if (configs.empty()) break;
    text += core::format(", {} for {} token{}", configs.front(), tokens, tokens == 1 ? "" : "s");
  }
  return text + passed_over(selection);
}

template <typename Implementations>
auto find_by_name(const Implementations& implementations, std::string_view wanted) {
  for (const auto* implementation : implementations) {
    if (implementation->name() == wanted) return implementation;
  }
  throw Error::unknown_name("require", wanted, list_names(implementations));
}

/// The first one that is not another device.
Reason reason_of(const std::vector<Candidate>& candidates) {
  for (const Candidate& candidate : candidates) {
    if (!candidate.support && candidate.support.reason != Reason::kDevice) {
      return candidate.support.reason;
    }
  }
  return candidates.front().support.reason;
}

/// A line for each reason that an implementation of the experts gives; the transports that it is
/// for, where that is not all of them.
std::string refusals(const std::vector<Candidate>& candidates) {
  std::string text;
  for (const ExpertsDescriptor* experts : all_experts()) {
    std::vector<std::pair<std::string, std::vector<std::string>>> reasons;
    for (const Candidate& candidate : candidates) {
      if (candidate.experts != experts) continue;
      const std::string why =
          candidate.support ? "only where it is asked for by name" : candidate.support.text;
      auto found = std::find_if(reasons.begin(), reasons.end(),
                                [&](const auto& reason) { return reason.first == why; });
      if (found == reasons.end()) found = reasons.insert(found, {why, {}});
      found->second.emplace_back(candidate.prepare_finalize->name());
    }
    for (const auto& [why, transports] : reasons) {
      text += core::format(
          "\n  {}{}: {}", experts->name(),
          reasons.size() == 1 ? "" : core::format(" with {}", core::join(transports, ", ")), why);
    }
  }
  return text;
}

Selection select_required(MoeConfig config, std::string_view require) {
  const std::size_t plus = require.find('+');
  const ExpertsDescriptor* experts = find_by_name(all_experts(), require.substr(0, plus));
  const PrepareFinalizeDescriptor* prepare_finalize = nullptr;
  if (plus != std::string_view::npos) {
    prepare_finalize = find_by_name(all_prepare_finalize(), require.substr(plus + 1));
    config.activation_format = prepare_finalize->activation_format();
  }

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
    // The first of the format that is asked for says most.
    const auto fits = [&](const Candidate& each) {
      return each.prepare_finalize->activation_format() == config.activation_format;
    };
    if (!refused || (fits(candidate) && !fits(*refused))) refused = &candidate;
  }
  if (!refused) {
    throw Error::invalid(
        "require", core::format("require {}: the two have different activation formats", require));
  }
  throw Error::unsupported(refused->support.reason, "require",
                           core::format("{}+{} cannot serve {}: {} ({})", refused->experts->name(),
                                        refused->prepare_finalize->name(), describe(config),
                                        refused->support.text, code(refused->support.reason)));
}

}  // namespace

std::span<const PrepareFinalizeDescriptor* const> all_prepare_finalize() {
  static const std::array<const PrepareFinalizeDescriptor*, 4> list{
      &no_ep(), &batched(), &all2all(), &allgather_reducescatter()};
  return list;
}

std::span<const ExpertsDescriptor* const> all_experts() {
  static const std::array<const ExpertsDescriptor*, 5> list{
      &cpu::descriptor(), &cuda::sm90_descriptor(), &cuda::sm89_descriptor(),
      &cuda::sm80_descriptor(), &reference::descriptor()};
  return list;
}

Selection explain(const MoeConfig& config) {
  Selection selection;
  selection.config = config;
  selection.candidates = make_candidates(config);
  const auto first = std::find_if(
      selection.candidates.begin(), selection.candidates.end(), [](const Candidate& candidate) {
        return candidate.support && !candidate.experts->on_request_only();
      });
  if (first != selection.candidates.end()) choose(selection, *first);
  return selection;
}

Selection select(const MoeConfig& config, std::string_view require) {
  if (!require.empty()) return select_required(config, require);
  Selection selection = explain(config);
  if (selection) return selection;
  // Who names a compute capability asks about a device that need not be here.
  const std::string problem =
      config.compute_capability ? std::string() : device_problem(config.device);
  if (!problem.empty()) {
    throw Error::unsupported(Reason::kDevice, "config.device",
                             core::format("{}: {}", to_string(config.device), problem));
  }
  throw Error::unsupported(
      reason_of(selection.candidates), "config",
      core::format("nothing here runs {}:{}", describe(config), refusals(selection.candidates)));
}

std::string Selection::pair() const {
  return core::format("{}+{}", experts->name(), prepare_finalize->name());
}

ModularKernel Selection::create(const Context& context) const {
  layer::check_chosen(*this);
  MoeConfig chosen = config;
  chosen.activation_format = prepare_finalize->activation_format();
  ModularKernel kernel(prepare_finalize->create(chosen, context), experts->create(chosen, context));
  if (core::has_log_hook()) core::log(LogLevel::kInfo, announcement(*this, kernel));
  return kernel;
}

std::int64_t Selection::packed_bytes() const {
  layer::check_chosen(*this);
  return experts->packed_bytes(config);
}

std::size_t Selection::peer_bytes(const RankOptions& ranks) const {
  layer::check_chosen(*this);
  if (config.device.is_cpu() || prepare_finalize == &batched()) return 0;
  const auto num_all = static_cast<int>(config.parallel.num_ranks());
  const int num_ranks = prepare_finalize == &no_ep() ? 1
                        : prepare_finalize == &all2all()
                            ? num_all
                            : static_cast<int>(config.parallel.gather_group().size());
  if (num_ranks < num_all) return PeerMemory::head_bytes();  // sums have a place of one size
  if (num_all == 1 || config.parallel.ep_size == 1) return 0;
  MoeConfig chosen = config;
  chosen.combine =
      layer::choose_rows(rank_costs(), config, ranks,
                         core::placement_of(ranks.placement, config.num_experts, num_all), {})
          .combine;
  return layer::PeerRows::arena_bytes(chosen, ranks, num_ranks).all();
}

std::size_t Selection::peer_bytes(const RankOptions& ranks, int num_ranks) const {
  layer::check_chosen(*this);
  FUSEDMOE_CHECK(num_ranks >= 1, "num_ranks", core::to_string(num_ranks), "at least 1");
  FUSEDMOE_CHECK(ranks.max_tokens_per_rank >= 1, "max_tokens_per_rank",
                 core::to_string(ranks.max_tokens_per_rank), "at least 1");
  Selection spread = *this;
  MoeConfig& all = spread.config;
  all.parallel = ParallelConfig::of({.dp_size = num_ranks, .expert_parallel = true});
  all.combine =
      ranks.combine.value_or(all.batch_invariant ? CombineMode::kPerSlot : CombineMode::kPerRank);
  spread.prepare_finalize = &all2all();
  return spread.peer_bytes(ranks);
}

Context make_context() {
  Context context;
  context.tuned = &tuned_configs();
  return context;
}

std::string Selection::table() const {
  using Row = std::array<std::string, 6>;
  std::vector<Row> rows{{"", "experts", "prepare_finalize", "format", "code", "how, or why not"}};
  for (const Candidate& candidate : candidates) {
    rows.push_back({candidate.chosen ? "*" : "", std::string(candidate.experts->name()),
                    std::string(candidate.prepare_finalize->name()),
                    std::string(name(candidate.prepare_finalize->activation_format())),
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
    row["activation_format"] = name(candidate.prepare_finalize->activation_format());
    row["supported"] = static_cast<bool>(candidate.support);
    row["code"] = code(candidate.support.reason);
    row["reason"] = candidate.support ? "" : candidate.support.text;
    row["runs"] = candidate.support ? candidate.support.text : "";
    rows.push_back(std::move(row));
  }
  return rows.dump(2);
}

}  // namespace fusedmoe
