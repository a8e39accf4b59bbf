// Which problems the kernel of one token has room for, and how it divides them.
#pragma once

#include "cuda/experts/row_format.h"
#include "cuda/formats/weight_format.h"
#include "cuda/mlp/kernel_config.h"
#include "cuda/one_token/one_token.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

class OneTokenPlan {
 public:
  /// `blocks`: of a launch, one for each multiprocessor.
  OneTokenPlan(const MoeConfig& config, const WeightFormat& format, int blocks)
      : config_(config), format_(format), rows_(config, format), blocks_(blocks) {}

  /// Whether the kernel computes the problem.
  bool supports(const ProblemSize& problem) const;
  OneTokenShape shape_of(const ProblemSize& problem) const;

 private:
  const MoeConfig& config_;
  const WeightFormat& format_;
  const RowFormat rows_;
  const int blocks_;
};

/// Whether the kernel of one token is likely faster than tiles.
bool prefers_one_token(const MlpShape& shape);

}  // namespace fusedmoe::cuda
