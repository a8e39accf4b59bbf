// The choice of tile configuration: a pure function of the problem's sizes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/gemm/grouped_gemm.h"

namespace fusedmoe::cuda {

/// How one forward runs.
struct GemmPlan {
  TileConfig tile;
  int splits = 1;         ///< of GEMM 2's K
  bool rows_f32 = false;  ///< GEMM 2 leaves its rows to the combine in f32, else in bf16
  constexpr bool operator==(const GemmPlan&) const = default;
};

/// "64x16k4 splits 2 f32"
std::string to_string(const GemmPlan& plan);

/// What the choice depends on.
struct GemmShape {
  WeightFormat format = WeightFormat::kBF16;
  bool batched = false;          ///< num_tokens is the capacity of each expert
  bool batch_invariant = false;  ///< only plans whose sums have one order for all sizes
  std::int64_t num_tokens = 0;
  std::int64_t topk = 0;
  std::int64_t num_local_experts = 0;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
};

GemmPlan choose_plan(const GemmShape& shape);
/// Every plan that computes the shape, the chosen one among them.
std::vector<GemmPlan> valid_plans(const GemmShape& shape);

/// While it lives, choose_plan() of this thread returns `plan`: to measure and to test each.
class PinnedPlan {
 public:
  explicit PinnedPlan(const GemmPlan& plan);
  ~PinnedPlan();
  PinnedPlan(const PinnedPlan&) = delete;
  PinnedPlan& operator=(const PinnedPlan&) = delete;
};

}  // namespace fusedmoe::cuda
