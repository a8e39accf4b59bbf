#include "cuda/gemm/heuristic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace fusedmoe::cuda {
namespace {

thread_local std::optional<GemmPlan> pinned;

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

bool valid(const GemmShape& shape, const GemmPlan& plan) {
  const bool one_order = plan.tile.k_groups == 1 && plan.splits == 1 && !plan.rows_f32;
  if (shape.batch_invariant && !one_order) return false;
  // The batched format's rows are the output.
  return !shape.batched || (plan.splits == 1 && !plan.rows_f32);
}

/// Whether rows in f32 stay in the L2, where they cost little.
bool rows_fit_f32(const GemmShape& shape) {
  constexpr std::int64_t kBytes = std::int64_t{16} << 20;
  return shape.num_tokens * shape.topk * shape.hidden * 4 <= kBytes;
}

}  // namespace

std::string to_string(const GemmPlan& plan) {
  return fmt::format("{} splits {} {}", to_string(plan.tile), plan.splits,
                     plan.rows_f32 ? "f32" : "bf16");
}

std::vector<GemmPlan> valid_plans(const GemmShape& shape) {
  std::vector<GemmPlan> plans;
  for (const TileConfig& tile : tile_configs()) {
    for (const int splits : {1, 2, 4}) {
      const GemmPlan plan{
          tile, splits,
          splits > 1 || (rows_fit_f32(shape) && !shape.batched && !shape.batch_invariant)};
      if (valid(shape, plan) && (splits == 1 || rows_fit_f32(shape))) plans.push_back(plan);
    }
  }
  return plans;
}

GemmPlan choose_plan(const GemmShape& shape) {
  if (pinned) return *pinned;
  // Counts of a random routing spread by about the square root of their mean.
  const double mean = rows_per_hit_expert(shape);
  const double rows = mean + std::sqrt(mean);
  const std::vector<GemmPlan> plans = valid_plans(shape);
  const auto wide_enough = [&](const GemmPlan& plan) {
    return plan.splits == 1 && static_cast<double>(plan.tile.max_tokens) >= rows;
  };
  const auto found = std::find_if(plans.begin(), plans.end(), wide_enough);
  return found != plans.end() ? *found : plans.back();
}

PinnedPlan::PinnedPlan(const GemmPlan& plan) {
  pinned = plan;
}
PinnedPlan::~PinnedPlan() {
  pinned.reset();
}

}  // namespace fusedmoe::cuda
