// balance(): DeepSeek's published example, their algorithm in plain loops, and what must always
// hold.
#include "fusedmoe/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include "error_text.h"

namespace fusedmoe::balance_test {

using Ids = std::vector<std::int32_t>;
using Loads = std::vector<double>;

// What DeepSeek publishes of EPLB's algorithm, as it is written down: one choice after the other.
struct Published {
  // The items of each pack; the heaviest first into the lightest pack with room.
  static std::vector<Ids> pack(const Loads& loads, int packs) {
    const std::size_t room = loads.size() / static_cast<std::size_t>(packs);
    std::vector<Ids> result(static_cast<std::size_t>(packs));
    Loads sums(result.size());
    std::vector<bool> done(loads.size());
    for (std::size_t step = 0; step < loads.size(); ++step) {
      std::size_t item = loads.size(), best = result.size();
      for (std::size_t i = 0; i < loads.size(); ++i) {
        if (done[i]) continue;
        if (item == loads.size() || (room > 1 && loads[i] > loads[item])) item = i;
      }
      for (std::size_t p = 0; p < result.size(); ++p) {
        if (result[p].size() < room && (best == result.size() || sums[p] < sums[best])) best = p;
      }
      done[item] = true;
      result[best].push_back(static_cast<std::int32_t>(item));
      sums[best] += loads[item];
    }
    return result;
  }

  static Ids map(const Loads& loads, int physical, int groups, int hosts, int ranks) {
    const auto experts = static_cast<int>(loads.size());
    Loads of_groups(static_cast<std::size_t>(groups));
    for (int e = 0; e < experts; ++e) of_groups[e / (experts / groups)] += loads[e];
    Ids result;
    for (const Ids& host : pack(of_groups, hosts)) {
      Ids held;
      for (const int group : host) {
        for (int i = 0; i < experts / groups; ++i) held.push_back(group * (experts / groups) + i);
      }
      Loads copies(held.size(), 1), shares;
      Ids kinds(held.size());
      std::iota(kinds.begin(), kinds.end(), 0);
      while (static_cast<int>(kinds.size()) < physical / hosts) {
        std::size_t best = 0;
        for (std::size_t i = 1; i < held.size(); ++i) {
          if (loads[held[i]] / copies[i] > loads[held[best]] / copies[best]) best = i;
        }
        kinds.push_back(static_cast<std::int32_t>(best));
        ++copies[best];
      }
      for (const int kind : kinds) shares.push_back(loads[held[kind]] / copies[kind]);
      for (const Ids& rank : pack(shares, ranks / hosts)) {
        for (const int copy : rank) result.push_back(held[kinds[copy]]);
      }
    }
    return result;
  }
};

double imbalance(const Loads& loads, const Ids& logical, int ranks) {
  Loads sums(static_cast<std::size_t>(ranks));
  for (std::size_t p = 0; p < logical.size(); ++p) {
    const auto copies = static_cast<double>(std::count(logical.begin(), logical.end(), logical[p]));
    sums[p * sums.size() / logical.size()] += loads[logical[p]] / copies;
  }
  const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
  return total > 0 ? *std::max_element(sums.begin(), sums.end()) * ranks / total : 0;
}

bool has_twins(const Ids& logical, int ranks) {
  const std::size_t each = logical.size() / static_cast<std::size_t>(ranks);
  for (std::size_t p = 0; p < logical.size(); p += each) {
    const auto first = logical.begin() + static_cast<std::ptrdiff_t>(p);
    const auto end = first + static_cast<std::ptrdiff_t>(each);
    if (std::set<std::int32_t>(first, end).size() < each) return true;
  }
  return false;
}

// Tokens on each expert if `topk` of them are drawn by Zipf's law, in an order of their own.
Loads zipf(int experts, int topk, int tokens, unsigned seed) {
  std::mt19937 random(seed);
  Ids order(static_cast<std::size_t>(experts));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  Loads weights, loads(order.size());
  for (int i = 0; i < experts; ++i) weights.push_back(1.0 / (i + 1));
  std::discrete_distribution<int> draw(weights.begin(), weights.end());
  for (int token = 0; token < tokens; ++token) {
    std::set<int> chosen;
    while (static_cast<int>(chosen.size()) < topk) chosen.insert(draw(random));
    for (const int i : chosen) ++loads[order[i]];
  }
  return loads;
}

TEST(BalanceTest, GivesThePublishedMap) {
  const Loads loads{90, 132, 40,  61, 104, 165, 39,  4,   73,  56, 183, 86,
                    20, 107, 104, 64, 19,  197, 187, 157, 172, 86, 16,  27};
  const auto layers =
      balance(loads, 12, {.num_ranks = 8, .redundant = 4, .num_hosts = 2, .num_groups = 4});
  ASSERT_EQ(layers.size(), 2);
  EXPECT_EQ(layers[0].placement.physical_to_logical(),
            (Ids{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1}));
  EXPECT_EQ(layers[1].placement.physical_to_logical(),
            (Ids{7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}));
  EXPECT_EQ(layers[0].placement.rank_of(), (Ids{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7}));
}

struct Draw {
  Loads loads;
  int experts, ranks, hosts, groups, redundant;
};

Draw draw(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Draw d;
  d.hosts = 1 + below(3);
  d.ranks = d.hosts * (1 + below(4));
  d.groups = d.hosts * (1 + below(3));
  do {
    d.experts = d.groups * (1 + below(8));
    const int most = d.experts * (d.ranks / d.hosts - 1);
    d.redundant = below((below(4) == 0 ? most : std::min(most, d.ranks)) + 1);
  } while ((d.experts + d.redundant) % d.ranks != 0);
  const int kind = below(3);  // reals; token counts, many of them equal; a few experts do it all
  for (int e = 0; e < d.experts; ++e) {
    const double real = std::generate_canonical<double, 53>(random);
    d.loads.push_back(kind == 0 ? real : kind == 1 ? below(6) : std::pow(real, 8));
  }
  return d;
}

// Where the published algorithm puts copies of an expert on one rank ours does not, and one that it
// makes worse stays; else the maps are the same.
TEST(BalanceTest, RandomLoadsAsPublished) {
  std::mt19937 random(1);
  int same = 0, stayed = 0, apart = 0;
  for (int run = 0; run < 10000; ++run) {
    const Draw d = draw(random);
    const BalancedLayer layer = balance(d.loads, d.experts,
                                        {.num_ranks = d.ranks,
                                         .redundant = d.redundant,
                                         .num_hosts = d.hosts,
                                         .num_groups = d.groups})
                                    .front();
    const Ids& map = layer.placement.physical_to_logical();
    const auto linear = ExpertPlacement::linear(d.experts, d.ranks, d.redundant);
    ASSERT_EQ(map.size(), d.experts + d.redundant);
    ASSERT_FALSE(has_twins(map, d.ranks)) << run;
    ASSERT_NEAR(layer.after, imbalance(d.loads, map, d.ranks), 1e-9) << run;
    ASSERT_NEAR(layer.before, imbalance(d.loads, linear.physical_to_logical(), d.ranks), 1e-9);
    // One host has one group: packing groups would only choose an order of equal experts.
    const Ids published = Published::map(d.loads, d.experts + d.redundant,
                                         d.hosts == 1 ? 1 : d.groups, d.hosts, d.ranks);
    if (d.hosts == 1) {
      ASSERT_LE(layer.after, layer.before) << run;
    }
    if (has_twins(published, d.ranks)) {
      ++apart;
    } else if (d.hosts == 1 &&
               imbalance(d.loads, published, d.ranks) >= layer.before * (1 - 1e-9)) {
      ASSERT_EQ(layer.placement, linear) << run;
      ++stayed;
    } else {
      ASSERT_EQ(map, published) << run;
      ++same;
    }
  }
  EXPECT_GT(same, 4000) << stayed << ' ' << apart;
  EXPECT_GT(stayed, 100);
  EXPECT_GT(apart, 1000);
}

TEST(BalanceTest, ExpertsThatStayKeepTheirPlaces) {
  std::mt19937 random(2);
  int moved = 0, stayed = 0;
  for (int run = 0; run < 500; ++run) {
    Draw d = draw(random);
    BalanceOptions options{.num_ranks = d.ranks,
                           .redundant = d.redundant,
                           .num_hosts = d.hosts,
                           .num_groups = d.groups};
    const ExpertPlacement before = balance(d.loads, d.experts, options).front().placement;
    options.placements = {before};
    std::shuffle(d.loads.begin(), d.loads.end(), random);
    const BalancedLayer layer = balance(d.loads, d.experts, options).front();
    for (int rank = 0; rank < d.ranks; ++rank) {
      const Ids was = before.local_experts(rank), is = layer.placement.local_experts(rank);
      for (std::size_t place = 0; place < was.size(); ++place) {
        const bool stays = std::find(is.begin(), is.end(), was[place]) != is.end();
        ++(stays ? stayed : moved);
        if (stays) {
          ASSERT_EQ(is[place], was[place]) << run << ' ' << rank;
        }
      }
    }
    options.placements = {layer.placement};  // nothing moves where nothing has changed
    ASSERT_EQ(balance(d.loads, d.experts, options).front().placement, layer.placement) << run;
  }
  EXPECT_GT(moved, 500);
  EXPECT_GT(stayed, 500);
}

TEST(BalanceTest, MovingAloneEvensOutZipf) {
  double before = 0, after = 0;
  constexpr unsigned kDraws = 8;
  for (unsigned seed = 0; seed < kDraws; ++seed) {
    const Loads loads = zipf(256, 8, 2000, seed);
    const BalancedLayer layer = balance(loads, 256, {.num_ranks = 8}).front();
    EXPECT_LT(layer.after, 1.06) << seed;
    before += layer.before / kDraws;
    after += layer.after / kDraws;
    // Without copies a rank has at least the load of the busiest expert. With copies ranks share
    // it.
    EXPECT_LT(balance(loads, 256, {.num_ranks = 8, .redundant = 8}).front().after, 1.03) << seed;
  }
  EXPECT_GT(before, 1.6);
  EXPECT_LT(after, 1.05);
}

// 61 layers of 256 experts and 32 copies on 32 ranks: what DeepSeek-V3 has.
TEST(BalanceTest, EachLayerIsPlannedByItself) {
  Loads loads;
  for (unsigned layer = 0; layer < 61; ++layer) {
    const Loads each = zipf(256, 8, 100, layer);
    loads.insert(loads.end(), each.begin(), each.end());
  }
  const BalanceOptions options{.num_ranks = 32, .redundant = 32};
  const auto layers = balance(loads, 256, options);
  ASSERT_EQ(layers.size(), 61);
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    const Loads own(loads.begin() + static_cast<std::ptrdiff_t>(layer) * 256,
                    loads.begin() + static_cast<std::ptrdiff_t>(layer + 1) * 256);
    EXPECT_EQ(layers[layer].placement, balance(own, 256, options).front().placement);
    EXPECT_LT(layers[layer].after, 1.1) << layer;
  }
}

TEST(BalanceTest, RefusesByName) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const double most = std::numeric_limits<double>::max();
  const Loads four(4, 1.0);
  const ExpertPlacement other = ExpertPlacement::linear(8, 2), fits = ExpertPlacement::linear(4, 2);
  const struct {
    Loads loads;
    std::int64_t experts;
    BalanceOptions options;
    std::string text;
  } table[] = {
      {four, 0, {}, "num_experts: was 0; must be at least 1"},
      {{}, 4, {}, "loads: was 0 numbers; must be one for each of 4 experts, layer by layer"},
      {four, 3, {}, "loads: was 4 numbers; must be one for each of 3 experts, layer by layer"},
      {{1, -1, 1, 1}, 4, {}, "loads[1]: was -1; must be a finite number that is not negative"},
      {{1, 1, nan, 1}, 4, {}, "loads[2]: was nan; must be a finite number"},
      {{1, 1, 1, inf}, 4, {}, "loads[3]: was inf; must be a finite number"},
      {{most, most, 1, 1}, 4, {}, "loads[1]: was 1.79769"},
      {four, 4, {.num_ranks = 0}, "num_ranks: was 0; must be at least 1"},
      {four, 4, {.num_ranks = 2, .num_hosts = 0}, "num_hosts: was 0; must be a divisor of the num"},
      {four, 4, {.num_ranks = 4, .num_hosts = 3}, "num_hosts: was 3; must be a divisor of the num"},
      {four,
       4,
       {.num_groups = 3},
       "num_groups: was 3; must be a divisor of the number of experts, 4"},
      {four, 4, {.num_groups = -1}, "num_groups: was -1"},
      {four,
       4,
       {.num_ranks = 4, .num_hosts = 4, .num_groups = 2},
       "num_hosts: was 4; must be a divisor of the number of groups, 2"},
      {four,
       4,
       {.num_ranks = 2, .redundant = -2},
       "redundant: was -2; must be from 0 to 4: a rank"},
      {four, 4, {.num_ranks = 2, .redundant = 6}, "redundant: was 6; must be from 0 to 4: a rank"},
      {four,
       4,
       {.num_ranks = 6},
       "redundant: was 0; must be a number such as 2, so that 6 ranks hold equally many experts"},
      {four, 4, {.num_ranks = 2, .redundant = 1}, "redundant: was 1; must be a number such as 2"},
      {four,
       4,
       {.num_ranks = 2, .placements = {other}},
       "placements[0]: was 8 experts on 2 ranks; must be 4 experts on 2 ranks"},
      {four,
       4,
       {.num_ranks = 2, .placements = {fits, fits}},
       "placements: was 2; must be 0, 1 or 1, one a layer"},
  };
  for (const auto& row : table) {
    const std::string text =
        testing::error_text([&] { balance(row.loads, row.experts, row.options); });
    EXPECT_TRUE(text.starts_with(row.text)) << text << "\nwanted " << row.text;
  }
}

TEST(BalanceTest, NoLoadMovesNothing) {
  const auto linear = ExpertPlacement::linear(6, 3);
  const BalancedLayer layer = balance(Loads(6), 6, {.num_ranks = 3}).front();
  EXPECT_EQ(layer.placement, linear);
  EXPECT_EQ(layer.before, 0);
  EXPECT_EQ(layer.after, 0);
}

}  // namespace fusedmoe::balance_test
