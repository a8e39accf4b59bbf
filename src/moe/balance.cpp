// DeepSeek's load balancing: groups of experts to hosts, copies of the busiest experts, experts to
// ranks.
#include "fusedmoe/balance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "core/check.h"

namespace fusedmoe {
namespace {

using Ids = std::vector<std::int32_t>;
using Loads = std::vector<double>;

/// What is packed: an item of a kind, of which a pack may hold one.
struct Items {
  Loads loads;
  Ids kinds;
};

/// Puts items into packs of equal number. No kind may have more items than there are packs.
class Packing {
 public:
  Packing(const Items& items, std::int64_t num_packs)
      : items_(items),
        capacity_(items.loads.size() / static_cast<std::size_t>(num_packs)),
        packs_(static_cast<std::size_t>(num_packs)),
        sums_(packs_.size()),
        holds_(packs_.size(), std::vector<bool>(items.loads.size())) {
    Ids order(items.loads.size());
    std::iota(order.begin(), order.end(), 0);
    if (capacity_ > 1) {  // else the order decides nothing but names
      std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
        return items.loads[a] > items.loads[b];
      });
    }
    for (const std::int32_t item : order) put(item);
  }

  /// The items of each pack, as they came.
  const std::vector<Ids>& packs() const { return packs_; }

 private:
  void put(std::int32_t item) {
    std::optional<std::size_t> lightest, lightest_of_all;
    for (std::size_t pack = 0; pack < packs_.size(); ++pack) {
      if (packs_[pack].size() == capacity_) continue;
      if (!lightest_of_all || sums_[pack] < sums_[*lightest_of_all]) lightest_of_all = pack;
      if (holds_[pack][items_.kinds[item]]) continue;
      if (!lightest || sums_[pack] < sums_[*lightest]) lightest = pack;
    }
    if (lightest) {
      packs_[*lightest].push_back(item);
      account(*lightest, item, true);
    } else {
      put_by_exchange(item, *lightest_of_all);
    }
  }

  /// Every pack with room has the item's kind already: a full one takes it, and gives an item to
  /// `open`. There always is one: it holds more kinds than `open` has beside the item's.
  void put_by_exchange(std::int32_t item, std::size_t open) {
    double least = std::numeric_limits<double>::infinity();
    std::size_t best_pack = 0, best_place = 0;
    for (std::size_t pack = 0; pack < packs_.size(); ++pack) {
      if (holds_[pack][items_.kinds[item]]) continue;
      for (std::size_t place = 0; place < packs_[pack].size(); ++place) {
        const std::int32_t given = packs_[pack][place];
        if (holds_[open][items_.kinds[given]]) continue;
        const double more = std::max(sums_[open] + items_.loads[given],
                                     sums_[pack] - items_.loads[given] + items_.loads[item]);
        if (more < least) least = more, best_pack = pack, best_place = place;
      }
    }
    const std::int32_t given = std::exchange(packs_[best_pack][best_place], item);
    packs_[open].push_back(given);
    account(best_pack, given, false);
    account(best_pack, item, true);
    account(open, given, true);
  }

  void account(std::size_t pack, std::int32_t item, bool comes) {
    sums_[pack] += comes ? items_.loads[item] : -items_.loads[item];
    holds_[pack][items_.kinds[item]] = comes;
  }

  const Items& items_;
  std::size_t capacity_;
  std::vector<Ids> packs_;
  Loads sums_;
  std::vector<std::vector<bool>> holds_;
};

/// One copy of each, then copies of whichever has most load per copy, but not more than
/// most_copies.
Items replicate(const Loads& loads, std::int64_t num_copies, std::int64_t most_copies) {
  std::vector<std::int64_t> copies(loads.size(), 1);
  Ids kinds(loads.size());
  std::iota(kinds.begin(), kinds.end(), 0);
  while (static_cast<std::int64_t>(kinds.size()) < num_copies) {
    std::optional<std::size_t> busiest;
    double most = 0;
    for (std::size_t i = 0; i < loads.size(); ++i) {
      if (copies[i] == most_copies) continue;
      const double share = loads[i] / static_cast<double>(copies[i]);
      if (!busiest || share > most) busiest = i, most = share;
    }
    ++copies[*busiest];
    kinds.push_back(static_cast<std::int32_t>(*busiest));
  }
  Items items{Loads(kinds.size()), std::move(kinds)};
  for (std::size_t i = 0; i < items.kinds.size(); ++i) {
    const std::int32_t kind = items.kinds[i];
    items.loads[i] = loads[kind] / static_cast<double>(copies[kind]);
  }
  return items;
}

struct Sizes {
  std::int64_t experts, ranks, physical, hosts, groups;
};

/// The experts of each rank.
std::vector<Ids> plan(std::span<const double> loads, const Sizes& sizes) {
  const std::int64_t group_size = sizes.experts / sizes.groups;
  Items groups{Loads(static_cast<std::size_t>(sizes.groups)), {}};
  for (std::int64_t e = 0; e < sizes.experts; ++e) groups.loads[e / group_size] += loads[e];
  groups.kinds.resize(groups.loads.size());
  std::iota(groups.kinds.begin(), groups.kinds.end(), 0);

  std::vector<Ids> ranks;
  const Packing hosts(groups, sizes.hosts);
  for (const Ids& host : hosts.packs()) {
    Ids experts;
    Loads of_experts;
    for (const std::int32_t group : host) {
      for (std::int64_t e = group * group_size; e < (group + 1) * group_size; ++e) {
        experts.push_back(static_cast<std::int32_t>(e));
        of_experts.push_back(loads[e]);
      }
    }
    const std::int64_t ranks_here = sizes.ranks / sizes.hosts;
    const Items copies = replicate(of_experts, sizes.physical / sizes.hosts, ranks_here);
    const Packing packing(copies, ranks_here);
    for (const Ids& rank : packing.packs()) {
      Ids& held = ranks.emplace_back();
      for (const std::int32_t copy : rank) held.push_back(experts[copies.kinds[copy]]);
    }
  }
  return ranks;
}

/// The same experts, those that `held` has too in its places.
Ids keep_places(const Ids& planned, const Ids& held) {
  Ids result(planned.size(), -1), rest = planned;
  for (std::size_t place = 0; place < std::min(held.size(), result.size()); ++place) {
    const auto found = std::find(rest.begin(), rest.end(), held[place]);
    if (found == rest.end()) continue;
    result[place] = held[place];
    rest.erase(found);
  }
  auto next = rest.begin();
  for (std::int32_t& expert : result) {
    if (expert < 0) expert = *next++;
  }
  return result;
}

double max_over_mean(std::span<const double> loads, const ExpertPlacement& placement) {
  const Ids &logical = placement.physical_to_logical(), &rank_of = placement.rank_of();
  Loads copies(loads.size()), ranks(static_cast<std::size_t>(placement.num_ranks()));
  for (const std::int32_t expert : logical) ++copies[expert];
  for (std::size_t p = 0; p < logical.size(); ++p) {
    ranks[rank_of[p]] += loads[logical[p]] / copies[logical[p]];
  }
  const double total = std::accumulate(loads.begin(), loads.end(), 0.0);
  const double most = *std::max_element(ranks.begin(), ranks.end());
  return total > 0 ? most / (total / static_cast<double>(ranks.size())) : 0;
}

bool ranks_hold(const ExpertPlacement& placement, std::int64_t experts) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(placement.num_ranks()));
  for (const std::int32_t rank : placement.rank_of()) ++counts[rank];
  return std::all_of(counts.begin(), counts.end(), [&](auto count) { return count == experts; });
}

BalancedLayer balance_layer(std::span<const double> loads, const Sizes& sizes,
                            const ExpertPlacement& before, bool keeps_places) {
  const std::vector<Ids> planned = plan(loads, sizes);
  Ids logical, rank_of;
  for (std::int64_t rank = 0; rank < sizes.ranks; ++rank) {
    const Ids held = keeps_places ? before.local_experts(static_cast<int>(rank)) : Ids();
    for (const std::int32_t expert : keep_places(planned[rank], held)) {
      logical.push_back(expert);
      rank_of.push_back(static_cast<std::int32_t>(rank));
    }
  }
  BalancedLayer result{
      {sizes.experts, static_cast<int>(sizes.ranks), std::move(logical), std::move(rank_of)},
      max_over_mean(loads, before)};
  result.after = max_over_mean(loads, result.placement);
  constexpr double kRounding = 1e-9;
  if (sizes.hosts == 1 && result.after >= result.before * (1 - kRounding) &&
      ranks_hold(before, sizes.physical / sizes.ranks)) {
    result.placement = before;
    result.after = result.before;
  }
  return result;
}

Sizes check_sizes(std::span<const double> loads, std::int64_t num_experts,
                  const BalanceOptions& options) {
  const auto& [ranks, redundant, hosts, groups, placements] = options;
  FUSEDMOE_CHECK(num_experts >= 1, "num_experts", core::to_string(num_experts), "at least 1");
  FUSEDMOE_CHECK(!loads.empty() && static_cast<std::int64_t>(loads.size()) % num_experts == 0,
                 "loads", core::format("{} numbers", loads.size()),
                 core::format("one for each of {} experts, layer by layer", num_experts));
  FUSEDMOE_CHECK(ranks >= 1, "num_ranks", core::to_string(ranks), "at least 1");
  FUSEDMOE_CHECK(hosts >= 1 && ranks % hosts == 0, "num_hosts", core::to_string(hosts),
                 core::format("a divisor of the number of ranks, {}", ranks));
  FUSEDMOE_CHECK(groups >= 0 && (groups == 0 || num_experts % groups == 0), "num_groups",
                 core::to_string(groups),
                 core::format("a divisor of the number of experts, {}", num_experts));
  const std::int64_t used_groups = hosts == 1 ? 1 : groups == 0 ? num_experts : groups;
  FUSEDMOE_CHECK(used_groups % hosts == 0, "num_hosts", core::to_string(hosts),
                 core::format("a divisor of the number of groups, {}", used_groups));
  const std::int64_t most = num_experts * (ranks / hosts - 1);
  FUSEDMOE_CHECK(redundant >= 0 && redundant <= most, "redundant", core::to_string(redundant),
                 core::format("from 0 to {}: a rank needs an expert once", most));
  const std::int64_t physical = num_experts + redundant, over = physical % ranks;
  FUSEDMOE_CHECK(over == 0, "redundant", core::to_string(redundant),
                 core::format("a number such as {}, so that {} ranks hold equally many experts",
                              redundant + ranks - over, ranks));
  return {num_experts, ranks, physical, hosts, used_groups};
}

void check_loads(std::span<const double> loads, std::int64_t num_experts) {
  double sum = 0;
  for (std::size_t i = 0; i < loads.size(); ++i) {
    if (static_cast<std::int64_t>(i) % num_experts == 0) sum = 0;
    sum += loads[i];
    FUSEDMOE_CHECK(loads[i] >= 0 && std::isfinite(sum), core::format("loads[{}]", i),
                   core::to_string(loads[i]),
                   "a finite number that is not negative, and so the sum over a layer");
  }
}

void check_placements(const std::vector<ExpertPlacement>& placements, std::size_t layers,
                      const Sizes& sizes) {
  FUSEDMOE_CHECK(placements.size() <= 1 || placements.size() == layers, "placements",
                 core::to_string(placements.size()),
                 core::format("0, 1 or {}, one a layer", layers));
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const ExpertPlacement& each = placements[i];
    FUSEDMOE_CHECK(each.num_experts() == sizes.experts && each.num_ranks() == sizes.ranks,
                   core::format("placements[{}]", i),
                   core::format("{} experts on {} ranks", each.num_experts(), each.num_ranks()),
                   core::format("{} experts on {} ranks", sizes.experts, sizes.ranks));
  }
}

}  // namespace

std::vector<BalancedLayer> balance(std::span<const double> loads, std::int64_t num_experts,
                                   const BalanceOptions& options) {
  const Sizes sizes = check_sizes(loads, num_experts, options);
  check_loads(loads, num_experts);
  const std::size_t layers = loads.size() / static_cast<std::size_t>(num_experts);
  check_placements(options.placements, layers, sizes);
  const bool linear = options.placements.empty();
  const std::vector<ExpertPlacement> before =
      linear
          ? std::vector{ExpertPlacement::linear(num_experts, options.num_ranks, options.redundant)}
          : options.placements;
  std::vector<BalancedLayer> result;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const auto of_layer = loads.subspan(layer * static_cast<std::size_t>(num_experts),
                                        static_cast<std::size_t>(num_experts));
    const ExpertPlacement& now = before[before.size() == 1 ? 0 : layer];
    result.push_back(balance_layer(of_layer, sizes, now, !linear));
  }
  return result;
}

}  // namespace fusedmoe
