#include "cuda/experts/one_token_plan.h"

#include <algorithm>

#include "cuda/experts/scratch.h"

namespace fusedmoe::cuda {

/// The kernel of one token has so many bytes of its own, mostly the tables of W4A8.
constexpr std::int64_t kTableBytes = 5 << 10;

std::int64_t OneTokenPlan::shared_bytes() const {
  return std::min(kOneTokenSharedBytes, device_.block_shared_bytes - kTableBytes);
}

OneTokenShape OneTokenPlan::shape_of(const ProblemSize& problem) const {
  OneTokenShape shape;
  shape.slots = problem.topk;
  shape.blocks = device_.multiprocessors;
  shape.slices[0] = slices_of(problem.intermediate, is_gated(config_.activation));
  shape.slices[1] = slices_of(problem.hidden, false);
  shape.block_k = format_.block.k;
  shape.k_blocks[0] = ceil_div(problem.hidden, shape.block_k);
  shape.k_blocks[1] = ceil_div(problem.intermediate, shape.block_k);
  shape.rows_by_slot = rows_.differ_by_expert();
  return shape;
}

bool OneTokenPlan::supports(const ProblemSize& problem) const {
  const bool has_kernel = !format_.int8_rows;  // the only rows without one
  return has_kernel && variant_of(config_) == Variant::kStandard && problem.num_tokens == 1 &&
         problem.topk <= kMaxSlotsOfOneToken && !rows_.needs_hidden_pass() &&
         shape_of(problem).layout().bytes <= shared_bytes();
}

/// The kernel of one token saves launches; where more weights are read, tiles read them faster. It
/// also loses where the slices of GEMM 2 leave multiprocessors without work. Limits as measured
/// (docs/performance-log.md).
bool prefers_one_token(const MlpShape& shape) {
  if (!valid(shape, kOneToken)) return false;
  const WeightFormat& format = *shape.format;
  constexpr std::int64_t kMiB = 1 << 20;
  const std::int64_t most = format.decodes ? 70 * kMiB : format.fp8_rows ? 150 * kMiB : 80 * kMiB;
  const BlockGrid first = format.grid(shape.intermediate, shape.hidden, shape.gated);
  const BlockGrid second = format.grid(shape.hidden, shape.intermediate, false);
  const std::int64_t bytes = shape.topk * (first.count() + second.count()) * format.block.bytes;
  const double least_busy = format.k_scales ? 0.65 : 0.75;
  const std::int64_t slices = slices_of(shape.hidden, false);
  const auto busy =
      static_cast<double>(slices) /
      static_cast<double>(ceil_div(slices, shape.multiprocessors) * shape.multiprocessors);
  return bytes <= most && busy >= least_busy;
}

}  // namespace fusedmoe::cuda
