#include "layer/agreement.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "core/check.h"
#include "fusedmoe/version.h"
#include "layer/row_choice.h"
#include "moe/placement.h"

namespace fusedmoe::layer {
namespace {

// One line for each fact, "name=value".
std::string text_of(const Facts& facts) {
  std::string text;
  for (const auto& [name, value] : facts) text += core::format("{}={}\n", name, value);
  return text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end == std::string::npos ? text.size() : end + 1;
  }
  return lines;
}

std::string list(const std::vector<int>& ranks) {
  return core::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", core::join(ranks, ", "));
}

/// "topk: ranks 0, 2 have 4, rank 1 has 8"
std::string difference(const Communicator& communicator,
                       const std::vector<std::vector<std::string>>& lines, std::size_t line) {
  std::map<std::string, std::vector<int>> by_value;
  std::string name;
  for (std::size_t r = 0; r < lines.size(); ++r) {
    const std::string& fact = line < lines[r].size() ? lines[r][line] : std::string("=nothing");
    const std::size_t equals = fact.find('=');
    if (name.empty()) name = fact.substr(0, equals);
    by_value[fact.substr(equals + 1)].push_back(communicator.global_rank(static_cast<int>(r)));
  }
  if (by_value.size() == 1) return {};
  std::vector<std::string> parts;
  parts.reserve(by_value.size());
  for (const auto& [value, ranks] : by_value) {
    parts.push_back(
        core::format("{} {} {}", list(ranks), ranks.size() == 1 ? "has" : "have", value));
  }
  return core::format("{}: {}", name, core::join(parts, ", "));
}

/// "sigmoid, renormalized, 4 of 8 groups, scaled by 2.5": how logits become ids and weights.
/// Monolithic experts route the rows of all ranks, so each rank must do the same.
std::string router_text(const RouterConfig& router, const RouterWeights& weights) {
  std::vector<std::string> parts{router.custom ? "custom" : std::string(name(router.scoring))};
  if (router.scoring == ScoringFunc::kSparsemixer) {
    parts.push_back(core::format("jitter {}", router.sparsemixer_jitter));
  }
  if (router.renormalize) {
    const bool usual = router.renormalize_epsilon == RouterConfig{}.renormalize_epsilon;
    const std::string epsilon = core::format(" with epsilon {}", router.renormalize_epsilon);
    parts.push_back("renormalized" + (usual ? std::string() : epsilon));
  }
  if (router.num_expert_group > 0) {
    parts.push_back(core::format("{} of {} groups", router.topk_group, router.num_expert_group));
  }
  if (router.routed_scaling_factor != 1) {
    parts.push_back(core::format("scaled by {}", router.routed_scaling_factor));
  }
  if (router.num_zero_experts > 0) {
    parts.push_back(core::format("{} zero experts", router.num_zero_experts));
  }
  if (weights.score_correction_bias) parts.emplace_back("score correction bias");
  return core::join(parts, ", ");
}

}  // namespace

void agree(Communicator& communicator, const std::function<Facts()>& prepare) {
  constexpr std::string_view kWhat = "agreement on a layer";
  std::string mine;
  communicator.together([&] { mine = text_of(prepare()); }, kWhat);
  std::vector<std::vector<std::string>> lines;
  std::size_t most = 0;
  for (const std::string& text : communicator.gather(mine, kWhat)) {
    lines.push_back(lines_of(text));
    most = std::max(most, lines.back().size());
  }
  for (std::size_t line = 0; line < most; ++line) {
    const std::string differs = difference(communicator, lines, line);
    if (!differs.empty()) {
      throw Error::communication(core::format("the ranks of a layer differ in {}", differs));
    }
  }
}

bool across_ranks(const LayerOptions& options) {
  return options.ranks.communicator && options.ranks.communicator->size() > 1;
}

void check_number_of_lanes(int lanes) {
  constexpr int kMost = 8;
  FUSEDMOE_CHECK(lanes >= 1 && lanes <= kMost, "options.ranks.lanes", core::to_string(lanes),
                 core::format("1 to {}", kMost));
}

LayerOptions complete(LayerOptions options) {
  RankOptions& ranks = options.ranks;
  options.parallel = parallel_of(options);
  options.parallel.validate();
  FUSEDMOE_CHECK(ranks.max_tokens_per_rank > 0 || !options.parallel.needs_dispatch(),
                 "options.ranks.max_tokens_per_rank", core::to_string(ranks.max_tokens_per_rank),
                 "positive: buffers of the other ranks are made for it");
  check_number_of_lanes(ranks.lanes);
  if (ranks.lanes > 1 && options.device.is_cpu()) {
    throw Error::unsupported(Reason::kDevice, "options.ranks.lanes",
                             "options.ranks.lanes: from 2 on only ranks on GPUs, which read each "
                             "other's memory");
  }
  FUSEDMOE_CHECK(ranks.receive_capacity >= 0, "options.ranks.receive_capacity",
                 core::to_string(ranks.receive_capacity), "not negative");
  // Ranks with the same tokens can only add sums, which do not depend on the batch either.
  const bool rows_travel = options.parallel.needs_dispatch();
  const CombineMode wanted =
      options.batch_invariant && rows_travel ? CombineMode::kPerSlot : CombineMode::kPerRank;
  FUSEDMOE_CHECK(!options.batch_invariant || ranks.combine.value_or(wanted) == wanted,
                 "options.ranks.combine", std::string(name(*ranks.combine)),
                 core::format("{} for batch_invariant", name(wanted)));
  // Through the memory of GPUs what is predicted to be faster.
  const bool is_open = !options.device.is_cpu() && rows_travel && !options.batch_invariant;
  if (!is_open) ranks.combine = ranks.combine.value_or(wanted);
  return options;
}

LayerWeights complete(LayerWeights weights, const LayerOptions& options) {
  const ParallelConfig& parallel = options.parallel;
  const std::int64_t num_experts = weights.router.num_experts;
  const ExpertPlacement placement = core::placement_of(options.ranks.placement, num_experts,
                                                       parallel.ep_size, "options.ranks.placement");
  if (parallel.ep_size == 1) return weights;
  if (!weights.expert_map && weights.experts.num_experts() == num_experts) {
    return local_weights(
        weights,
        {.dp_size = parallel.dp_size, .ep_size = parallel.ep_size, .ep_rank = parallel.ep_rank},
        placement);
  }
  const auto held = static_cast<std::int64_t>(placement.local_experts(parallel.ep_rank).size());
  FUSEDMOE_CHECK(weights.experts.num_experts() == std::max<std::int64_t>(held, 1), "experts",
                 core::format("{} experts", weights.experts.num_experts()),
                 core::format("{}, as the placement gives to rank {}, or all {} without a map",
                              held, parallel.ep_rank, num_experts));
  weights.expert_map = placement.expert_map(parallel.ep_rank);
  return weights;
}

Facts facts_of(const MoeConfig& config, const LayerWeights& weights, const LayerOptions& options,
               const Selection& selection) {
  const ParallelConfig& parallel = config.parallel;
  const RankOptions& ranks = options.ranks;
  const auto number = [](auto value) { return core::to_string(value); };
  Facts facts{
      {"version", FUSEDMOE_VERSION},
      {"pair", selection.pair()},
      {"layout_version", number(selection.experts->layout_version())},
      {"num_experts", number(config.num_experts)},
      {"topk", number(config.topk)},
      {"router", router_text(weights.router, weights.router_weights)},
      {"hidden", number(config.hidden)},
      {"dtype", std::string(name(config.dtype))},
      {"scheme", name(config.scheme)},
      {"activation", std::string(name(config.activation))},
      {"router weight on input", number(config.apply_router_weight_on_input)},
      {"hooks", number(config.hooks)},
      {"monolithic", number(options.monolithic)},
      {"batch_invariant", number(config.batch_invariant)},
      {"tp_size", number(parallel.tp_size)},
      {"dp_size", number(parallel.dp_size)},
      {"ep_size", number(parallel.ep_size)},
      {"sequence_parallel", number(parallel.sequence_parallel)},
      {"combine", ranks.combine ? std::string(name(*ranks.combine)) : "the faster"},
      {"combine_dtype", std::string(name(ranks.combine_dtype.value_or(config.dtype)))},
      {"dispatch_dtype",
       config.dispatch_dtype ? std::string(name(*config.dispatch_dtype)) : "not given"},
      {"replica_choice", ranks.replica_choice == ReplicaChoice::kHash ? "hash" : "nearest"},
      {"max_tokens_per_rank", number(ranks.max_tokens_per_rank)},
      {"receive_capacity", number(ranks.receive_capacity)},
      {"drop_rows", number(ranks.drop_rows)},
      {"max_workspace_bytes", number(options.max_workspace_bytes)},
      {"lanes", number(ranks.lanes)},
      {"placement", ranks.placement ? ranks.placement->json() : "linear"},
  };
  if (parallel.tp_size == 1) facts.emplace_back("intermediate", number(config.intermediate));
  const bool gathers = selection.prepare_finalize == &allgather_reducescatter();
  if (leaves_choice(config, ranks, gathers ? RowPath::kAllgather : RowPath::kAll2all))
    std::ranges::move(facts_of(rank_costs()), std::back_inserter(facts));
  return facts;
}

Facts facts_of(const RankCosts& costs) {
  Facts facts;
  const auto add = [&](const std::string& link, const LinkCost& cost) {
    const std::pair<const char*, double> numbers[] = {
        {"floor_us", cost.floor_us}, {"gigabytes_per_second", cost.bytes_per_us / 1e3}};
    for (const auto& [number, value] : numbers) {
      facts.emplace_back(core::format("{}.{} of FUSEDMOE_RANK_COSTS", link, number),
                         core::format("{}", value));
    }
  };
  for (const RowPath path : {RowPath::kPeerMemory, RowPath::kAll2all, RowPath::kAllgather}) {
    const RowCosts& rows = costs.of(path);
    add(core::format("{}.dispatch", name(path)), rows.dispatch);
    add(core::format("{}.per_rank", name(path)), rows.per_rank);
    add(core::format("{}.per_slot", name(path)), rows.per_slot);
  }
  add("quantize", costs.quantize);
  return facts;
}

}  // namespace fusedmoe::layer

namespace fusedmoe {

ParallelConfig parallel_of(const LayerOptions& options) {
  const std::shared_ptr<Communicator>& ranks = options.ranks.communicator;
  if (!ranks || options.parallel != ParallelConfig{}) return options.parallel;
  return ParallelConfig::of(
      {.dp_size = ranks->size(), .expert_parallel = true, .rank = ranks->rank()});
}

}  // namespace fusedmoe
