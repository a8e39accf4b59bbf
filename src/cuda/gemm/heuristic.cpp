#include "cuda/gemm/heuristic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace fusedmoe::cuda {
namespace {

/// Rows of an expert that has any, on average, when every token draws topk experts at random. In
/// the batched format anything up to the capacity is possible: a quarter of it.
double rows_per_hit_expert(const GemmShape& shape) {
  const auto tokens = static_cast<double>(shape.num_tokens);
  if (shape.batched) return std::max(1.0, tokens / 4);
  const auto experts = static_cast<double>(shape.num_local_experts);
  const auto topk = static_cast<double>(shape.topk);
  const double missed = std::pow(std::max(0.0, 1 - topk / experts), tokens);
  return tokens * topk / std::max(1.0, experts * (1 - missed));
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

GemmPlan choose_plan(const GemmShape& shape) {
  // Counts of a random routing spread by about the square root of their mean.
  const double mean = rows_per_hit_expert(shape);
  const auto slots = static_cast<double>(shape.num_tokens * shape.topk);
  const double hit_experts =
      shape.batched ? static_cast<double>(shape.num_local_experts) : slots / mean;
  constexpr double kMultiprocessors = 132;
  const auto tiles_of = [&](std::int64_t width, const TileConfig& tile) {
    return hit_experts * static_cast<double>(ceil_div(width, tile.tile_row_blocks() * kRecordRows));
  };
  // Rows that tiles should have room for. Decoding costs the same whatever a tile's rows, and wide
  // tiles share what a stage costs; only where those of GEMM 1 leave multiprocessors without work
  // small ones are better.
  double rows = mean + std::sqrt(mean);
  constexpr TileConfig kWide = kTileConfigs[1];
  static_assert(kWide.has_epilogue_warpgroup() && !kTileConfigs[2].has_epilogue_warpgroup());
  const std::int64_t gate_and_up = 2 * shape.intermediate;  // most weights are gated
  if (is_decoded(shape.format) && tiles_of(gate_and_up, kWide) > kMultiprocessors) {
    rows = std::max<double>(rows, kWide.max_tokens);
  }
  GemmPlan chosen;
  for (const GemmPlan& plan : valid_plans(shape)) {
    if (plan.splits != 1) continue;
    chosen = plan;
    if (static_cast<double>(plan.tile.max_tokens) >= rows) break;
  }
  // Few tiles of GEMM 2, less than one and a half for each multiprocessor, are bound by their
  // weights and end late.
  constexpr int kFewRows = 64;
  if (chosen.tile.max_tokens > kFewRows) return chosen;
  for (const int splits : kSplits) {
    GemmPlan split = chosen;
    split.splits = splits;
    if (!valid(shape, split)) break;
    chosen = split;
    if (splits * tiles_of(shape.hidden, chosen.tile) >= 1.5 * kMultiprocessors) break;
  }
  return chosen;
}

}  // namespace fusedmoe::cuda
