#include "cuda/gemm/heuristic.h"

#include "core/format.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace fusedmoe::cuda {
namespace {

constexpr double kMultiprocessors = 132;
constexpr TileConfig kKGroups = kTileConfigs[0], kEpilogueWarpgroup = kTileConfigs[1];
static_assert(kKGroups.k_groups > 1 && kEpilogueWarpgroup.has_epilogue_warpgroup() &&
              !kTileConfigs[2].has_epilogue_warpgroup());

/// What a routing at random makes of a shape.
struct Load {
  double hit_experts;  // that have rows
  double rows;         // of each of them, on average
  double spread;       // of their rows: standard deviation
};

/// Every token draws topk of the local experts; with an expert map it would draw fewer. In the
/// batched format anything up to the capacity is possible: a quarter of it.
Load expected_load(const GemmShape& shape) {
  const auto tokens = static_cast<double>(shape.num_tokens);
  const auto experts = static_cast<double>(shape.num_local_experts);
  if (shape.batched) {
    const double rows = std::max(1.0, tokens / 4);
    return {experts, rows, std::sqrt(rows)};
  }
  const auto topk = static_cast<double>(shape.topk);
  const double share = std::min(1.0, topk / experts);
  const double hit = std::max(1.0, experts * (1 - std::pow(1 - share, tokens)));
  const double rows = std::max(1.0, tokens * topk / hit);
  return {hit, rows, std::sqrt(rows * (1 - share))};
}

/// How many times the tiles of a GEMM of so many outputs, `rows` to an expert, occupy all
/// multiprocessors.
double waves(const Load& load, double rows, std::int64_t width, const TileConfig& tile) {
  const std::int64_t cluster_rows = tile.tile_row_blocks() * tile.cluster * kRecordRows;
  return load.hit_experts * std::ceil(rows / tile.max_tokens) *
         static_cast<double>(ceil_div(width, cluster_rows)) * tile.cluster / kMultiprocessors;
}

std::int64_t gate_and_up(const GemmShape& shape) {
  return 2 * shape.intermediate;  // most weights are gated
}

/// Whether each split has enough of K to be worth it.
bool is_long_enough(const GemmShape& shape, int splits) {
  constexpr int kLeastBlocks = 8;
  return splits == 1 || splits * kLeastBlocks <= ceil_div(shape.intermediate, kRecordK);
}

/// The narrowest tiles that have room for an expert's rows. Thresholds are fitted to what `fusedmoe
/// tune` measured for 21 layers (docs/performance.md).
TileConfig choose_tile(const GemmShape& shape, const Load& load, const PlanList& plans) {
  const std::int64_t k_blocks = ceil_div(shape.intermediate, kRecordK);
  const auto k = static_cast<double>(k_blocks);
  const bool decoded = is_decoded(shape.format);
  // K groups keep all multiprocessors at work while larger tiles of GEMM 1 are few. When they are
  // more, K groups do not pay for weights that are decoded, which costs the same whatever a tile's
  // rows; nor, with a short K, does any tile with an epilogue warpgroup for those that are not.
  const double large = waves(load, load.rows, gate_and_up(shape), kEpilogueWarpgroup);
  const bool few = large <= (decoded ? 1 + k / 20 : std::max(1.0, k * k / 15));
  const auto room = [&](const TileConfig& tile) {
    const double tokens = tile.max_tokens;
    if (!tile.has_epilogue_warpgroup()) return tokens;
    if (!few && (tile == kKGroups || !decoded)) return 0.0;
    // An epilogue warpgroup takes longer over many rows than a short K takes to multiply.
    return std::min({tokens, 1.5 * k, decoded ? double{kMmaSyncTokens} : tokens});
  };
  constexpr int kShort = 8;
  TileConfig chosen;
  for (const GemmPlan& plan : plans) {
    // Blocks of a cluster wait for each other at the end of each tile.
    if (plan.tile.cluster > 1 && k_blocks < kShort) continue;
    chosen = plan.tile;
    if (room(chosen) >= load.rows + load.spread) break;
  }
  return chosen;
}

/// Where tiles do not occupy all multiprocessors for long, the plan of the fewest whole waves, by
/// what a tile costs. Constants fitted as above.
GemmPlan fill_waves(const GemmShape& shape, const Load& load, const PlanList& plans) {
  // In columns of one record: it costs those of its tile and kColumnsOfWeights more, and each
  // number that the combine adds kColumnsOfSum.
  constexpr double kColumnsOfWeights = 60, kColumnsOfSum = 1.0 / 64;
  const double most_rows = load.rows + load.spread / 2;
  const auto all_rows = static_cast<double>(shape.num_tokens * shape.topk);
  GemmPlan best = *plans.begin();
  double least = std::numeric_limits<double>::infinity();
  for (const GemmPlan& plan : plans) {
    if (!is_long_enough(shape, plan.splits)) continue;
    const TileConfig& tile = plan.tile;
    const double columns = std::ceil(load.rows / std::ceil(most_rows / tile.max_tokens) / 16) * 16;
    const auto k_blocks = [&](std::int64_t width, std::int64_t k, int splits) {
      return std::ceil(splits * waves(load, most_rows, width, tile)) *
             static_cast<double>(ceil_div(ceil_div(k, kRecordK), splits));
    };
    const double cost = (k_blocks(gate_and_up(shape), shape.hidden, 1) +
                         k_blocks(shape.hidden, shape.intermediate, plan.splits)) *
                            tile.tile_row_blocks() * (kColumnsOfWeights + columns) +
                        kColumnsOfSum * plan.splits * all_rows * static_cast<double>(shape.hidden);
    if (cost < least) {
      least = cost;
      best = plan;
    }
  }
  return best;
}

/// Rows in f32 up to so many bytes stay in the L2, where they cost little.
constexpr std::int64_t kBytesF32 = std::int64_t{16} << 20;

}  // namespace

std::string to_string(const GemmPlan& plan) {
  return core::format("{} splits {} {}", to_string(plan.tile), plan.splits,
                      plan.rows_f32 ? "f32" : "bf16");
}

std::optional<GemmPlan> parse_plan(std::string_view text) {
  static const auto kPlans = [] {
    std::vector<std::pair<std::string, GemmPlan>> plans;
    for (const TileConfig& tile : tile_configs()) {
      for (const int splits : kSplits) {
        for (const bool rows_f32 : {false, true}) {
          const GemmPlan plan{tile, splits, rows_f32};
          plans.emplace_back(to_string(plan), plan);
        }
      }
    }
    return plans;
  }();
  for (const auto& [name, plan] : kPlans) {
    if (name == text) return plan;
  }
  return std::nullopt;
}

std::int64_t max_tokens_f32(const GemmShape& shape) {
  if (shape.batched || shape.unfused || shape.batch_invariant) return 0;
  return kBytesF32 / std::max<std::int64_t>(1, shape.topk * shape.hidden * 4);
}

bool valid(const GemmShape& shape, const GemmPlan& plan) {
  const auto tiles = tile_configs();
  return std::find(tiles.begin(), tiles.end(), plan.tile) != tiles.end() &&
         std::find(std::begin(kSplits), std::end(kSplits), plan.splits) != std::end(kSplits) &&
         // A split has a block of K.
         plan.splits <= std::max<std::int64_t>(1, ceil_div(shape.intermediate, kRecordK)) &&
         // One order of the sums for all sizes, and one instruction.
         (!shape.batch_invariant ||
          (plan.tile.k_groups == 1 &&
           !(is_decoded(shape.format) && plan.tile.has_epilogue_warpgroup()))) &&
         // Rows that are an output, or that hooks see, are bf16.
         (!plan.rows_f32 || shape.num_tokens <= max_tokens_f32(shape)) &&
         (plan.rows_f32 || plan.splits == 1);
}

PlanList valid_plans(const GemmShape& shape) {
  const bool rows_f32 = shape.num_tokens <= max_tokens_f32(shape);
  PlanList plans;
  for (const TileConfig& tile : tile_configs()) {
    for (const int splits : kSplits) {
      const GemmPlan plan{tile, splits, rows_f32};
      if (valid(shape, plan)) plans.push_back(plan);
    }
  }
  return plans;
}

GemmPlan largest_plan(const GemmShape& shape) {
  static_assert(std::is_sorted(
      std::begin(kTileConfigs), std::end(kTileConfigs),
      [](const TileConfig& a, const TileConfig& b) { return a.max_tokens < b.max_tokens; }));
  static_assert(std::is_sorted(std::begin(kSplits), std::end(kSplits)));
  const bool rows_f32 = shape.num_tokens <= max_tokens_f32(shape);
  return {kTileConfigs[0], rows_f32 ? *std::rbegin(kSplits) : 1, rows_f32};
}

GemmPlan choose_plan(const GemmShape& shape) {
  const Load load = expected_load(shape);
  const PlanList plans = valid_plans(shape);
  const TileConfig tile = choose_tile(shape, load, plans);
  constexpr double kFew = 0.6;  // fitted as the others
  const auto waves_of_gemm1 = [&](const TileConfig& of) {
    return waves(load, load.rows, gate_and_up(shape), of);
  };
  if (waves_of_gemm1(tile) <= kFew || waves_of_gemm1(kKGroups) <= 1) {
    return fill_waves(shape, load, plans);
  }
  // Few tiles of GEMM 2 end late: one and a half for each multiprocessor where they are bound by
  // their weights, one where there are more rows to add.
  constexpr int kFewTokens = 64;
  const double wanted = tile.max_tokens <= kFewTokens ? 1.5 : 1;
  GemmPlan chosen;
  for (const GemmPlan& plan : plans) {
    if (plan.tile != tile || !is_long_enough(shape, plan.splits)) continue;
    chosen = plan;
    if (plan.splits * waves(load, load.rows, shape.hidden, tile) >= wanted) break;
  }
  return chosen;
}

}  // namespace fusedmoe::cuda
