// Which problems the kernel of one token has room for, and how it divides them.
#pragma once

#include "cuda/device/limits.h"
#include "cuda/experts/row_format.h"
#include "cuda/formats/weight_format.h"
#include "cuda/mlp/kernel_choice.h"
#include "cuda/one_token/one_token.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

class OneTokenPlan {
 public:
  /// A launch has a block for each multiprocessor of the device.
  OneTokenPlan(const MoeConfig& config, const WeightFormat& format, const RowFormat& rows,
               const DeviceLimits& device)
      : config_(config), format_(format), rows_(rows), device_(device) {}

  /// Whether the kernel computes the problem.
  bool supports(const ProblemSize& problem) const;
  OneTokenShape shape_of(const ProblemSize& problem) const;
  /// Shared memory for the layout of a shape.
  std::int64_t shared_bytes() const;

 private:
  const MoeConfig& config_;
  const WeightFormat& format_;
  const RowFormat rows_;
  const DeviceLimits device_;
};

/// Whether the kernel of one token is likely faster than tiles.
bool prefers_one_token(const MlpShape& shape);

}  // namespace fusedmoe::cuda
