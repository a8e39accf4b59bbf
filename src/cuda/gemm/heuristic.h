// The choice of tile configuration: a pure function of the problem's sizes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

#include "cuda/gemm/grouped_gemm.h"
#include "tools/tune.h"

namespace fusedmoe::cuda {

/// How one forward runs.
struct GemmPlan {
  TileConfig tile;
  int splits = 1;         ///< of GEMM 2's K
  bool rows_f32 = false;  ///< GEMM 2 leaves its rows to the combine in f32, else in bf16
  constexpr bool operator==(const GemmPlan&) const = default;
};

/// "64x16k4c1 splits 2 f32"
std::string to_string(const GemmPlan& plan);
/// Inverse, of plans whose tile is compiled; none for anything else.
std::optional<GemmPlan> parse_plan(std::string_view text);

inline constexpr int kSplits[] = {1, 2, 4};

/// Plans in place: a forward allocates nothing.
class PlanList {
 public:
  void push_back(const GemmPlan& plan) { plans_[size_++] = plan; }
  std::size_t size() const { return size_; }
  const GemmPlan* begin() const { return plans_.data(); }
  const GemmPlan* end() const { return plans_.data() + size_; }

 private:
  std::array<GemmPlan, std::size(kTileConfigs) * std::size(kSplits)> plans_;
  std::size_t size_ = 0;
};

/// What the choice depends on.
struct GemmShape {
  WeightFormat format = WeightFormat::kBF16;
  bool batched = false;          ///< num_tokens is the capacity of each expert
  bool unfused = false;          ///< hooks see the rows of GEMM 2
  bool batch_invariant = false;  ///< only plans whose sums have one order for all sizes
  std::int64_t num_tokens = 0;
  std::int64_t topk = 0;
  std::int64_t num_local_experts = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
};

GemmPlan choose_plan(const GemmShape& shape);
/// Whether the plan computes the shape.
bool valid(const GemmShape& shape, const GemmPlan& plan);
/// Every plan worth measuring, the chosen one among them: the valid ones, but rows in bf16 only
/// where they cannot be in f32, which is more exact.
PlanList valid_plans(const GemmShape& shape);
/// A plan, not always a valid one, that takes no less scratch than any valid one: fewest tokens to
/// a tile, most splits. Every forward asks for it several times.
GemmPlan largest_plan(const GemmShape& shape);
/// Tokens up to which rows may be in f32: where the scratch of the largest plan is largest.
std::int64_t max_tokens_f32(const GemmShape& shape);

/// While it lives, experts of this thread run `plan` where it is valid: to test each.
class PinnedPlan {
 public:
  explicit PinnedPlan(const GemmPlan& plan) : pin_(to_string(plan)) {}

 private:
  PinnedTilePlan pin_;
};

}  // namespace fusedmoe::cuda
