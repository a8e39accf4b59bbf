#include "cuda/gemm/heuristic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace fusedmoe::cuda {
namespace {

constexpr double kMultiprocessors = 132;
constexpr TileConfig kNarrow = kTileConfigs[0], kWide = kTileConfigs[1];

/// What a routing at random makes of a shape.
struct Load {
  double hit_experts;  // that have rows
  double rows;         // of each of them, on average
  double spread;       // of their rows: standard deviation
};

/// Every token draws topk experts. In the batched format anything up to the capacity is possible: a
/// quarter of it.
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
  const double rows = tokens * topk / hit;
  return {hit, rows, std::sqrt(rows * (1 - share))};
}

/// Tiles of a GEMM of so many outputs, `rows` to an expert; those of a cluster are one.
double num_tiles(const Load& load, double rows, std::int64_t width, const TileConfig& tile) {
  return load.hit_experts * std::ceil(rows / tile.max_tokens) *
         static_cast<double>(ceil_div(width, tile.tile_row_blocks() * tile.cluster * kRecordRows));
}

std::int64_t gate_and_up(const GemmShape& shape) {
  return 2 * shape.intermediate;  // most weights are gated
}

/// Whether each split has enough of K to be worth it.
bool is_long_enough(const GemmShape& shape, int splits) {
  constexpr int kLeastBlocks = 8;
  return splits == 1 || splits * kLeastBlocks <= ceil_div(shape.intermediate, kRecordK);
}

/// Rows in f32 up to so many bytes stay in the L2, where they cost little.
constexpr std::int64_t kBytesF32 = std::int64_t{16} << 20;

}  // namespace

std::string to_string(const GemmPlan& plan) {
  return fmt::format("{} splits {} {}", to_string(plan.tile), plan.splits,
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

namespace {

/// The narrowest tiles that have room for an expert's rows. Thresholds are fitted to what `fusedmoe
/// tune` measured for 21 layers (docs/performance.md).
TileConfig choose_tile(const GemmShape& shape, const Load& load) {
  const std::int64_t k_blocks = ceil_div(shape.intermediate, kRecordK);
  const auto k = static_cast<double>(k_blocks);
  const bool decoded = is_decoded(shape.format);
  // While the wide tiles of GEMM 1 are few, narrow ones keep all multiprocessors at work. When they
  // are more, wide ones are better for weights that are decoded, which costs the same whatever a
  // tile's rows, and where K is so short that K groups have little of it.
  const double rounds = num_tiles(load, load.rows, gate_and_up(shape), kWide) / kMultiprocessors;
  const bool narrow = rounds <= (decoded ? 1 + k / 20 : std::max(1.0, k * k / 15));
  const auto room = [&](const TileConfig& tile) {
    const double tokens = tile.max_tokens;
    if (!tile.has_epilogue_warpgroup()) return tokens;
    if (!narrow && (tile == kNarrow || !decoded)) return 0.0;
    // An epilogue warpgroup takes longer over many rows than a short K takes to multiply.
    return std::min({tokens, 1.5 * k, decoded ? double{kMmaSyncTokens} : tokens});
  };
  constexpr int kShort = 8;
  TileConfig chosen;
  for (const GemmPlan& plan : valid_plans(shape)) {
    // Blocks of a cluster wait for each other at the end of each tile.
    if (plan.tile.cluster > 1 && k_blocks < kShort) break;
    chosen = plan.tile;
    if (room(chosen) >= load.rows + load.spread) break;
  }
  return chosen;
}

/// Where there are not enough tiles for all multiprocessors, how they fill them decides.
GemmPlan fill_rounds(const GemmShape& shape, const Load& load) {
  // A K block of 64 weight rows takes as long as its tokens and so many more; a number that the
  // combine adds, as long as a part of one.
  constexpr double kTokensOfWeights = 60, kTokensOfSum = 1.0 / 64;
  const auto all_rows = static_cast<double>(shape.num_tokens * shape.topk);
  GemmPlan best;
  double least = std::numeric_limits<double>::infinity();
  for (const GemmPlan& plan : valid_plans(shape)) {
    if (!is_long_enough(shape, plan.splits)) continue;
    const TileConfig& tile = plan.tile;
    const double most = load.rows + load.spread / 2;
    const double columns = std::ceil(load.rows / std::ceil(most / tile.max_tokens) / 16) * 16;
    const auto rounds = [&](std::int64_t width, int splits) {
      const double at_once = std::floor(kMultiprocessors / tile.cluster);
      return std::ceil(splits * num_tiles(load, most, width, tile) / at_once);
    };
    const auto k_blocks = [](std::int64_t k, int splits) {
      return static_cast<double>(ceil_div(ceil_div(k, kRecordK), splits));
    };
    const double blocks =
        rounds(gate_and_up(shape), 1) * k_blocks(shape.hidden, 1) +
        rounds(shape.hidden, plan.splits) * k_blocks(shape.intermediate, plan.splits);
    const double cost = blocks * tile.tile_row_blocks() * (kTokensOfWeights + columns) +
                        kTokensOfSum * plan.splits * all_rows * static_cast<double>(shape.hidden);
    if (cost < least) {
      least = cost;
      best = plan;
    }
  }
  return best;
}

}  // namespace

GemmPlan choose_plan(const GemmShape& shape) {
  const Load load = expected_load(shape);
  const TileConfig tile = choose_tile(shape, load);
  const auto rounds = [&](std::int64_t width, const TileConfig& of) {
    return of.cluster * num_tiles(load, load.rows, width, of) / kMultiprocessors;
  };
  constexpr double kFew = 0.6;
  if (rounds(gate_and_up(shape), tile) <= kFew || rounds(gate_and_up(shape), kNarrow) <= 1) {
    return fill_rounds(shape, load);
  }
  // Few tiles of GEMM 2 end late: one and a half for each multiprocessor where they are bound by
  // their weights, one where there are more rows to add.
  constexpr int kFewTokens = 64;
  const double wanted = tile.max_tokens <= kFewTokens ? 1.5 : 1;
  GemmPlan chosen;
  for (const GemmPlan& plan : valid_plans(shape)) {
    if (plan.tile != tile || !is_long_enough(shape, plan.splits)) continue;
    chosen = plan;
    if (plan.splits * rounds(shape.hidden, tile) >= wanted) break;
  }
  return chosen;
}

}  // namespace fusedmoe::cuda
