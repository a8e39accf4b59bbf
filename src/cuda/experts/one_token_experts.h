// The launch of the kernel of one token.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "cuda/experts/one_token_plan.h"
#include "cuda/experts/operand_rows.h"
#include "cuda/experts/scratch.h"
#include "cuda/mlp/fused_mlp.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

class OneTokenExperts {
 public:
  OneTokenExperts(const MoeConfig& config, const WeightFormat& format, const OperandRows& rows,
                  const OneTokenPlan& plan)
      : config_(config), launch_(one_token_launch(format)), rows_(rows), plan_(plan) {}

  /// Enqueues a problem that the plan supports. Of `mlp` it takes the GEMMs, the activation and the
  /// quantizer.
  void run(const ForwardArgs& args, const Scratch& scratch, const FusedMlpParams& mlp,
           const ProblemSize& problem) const;

 private:
  const MoeConfig& config_;
  const OneTokenLaunch launch_;
  const OperandRows& rows_;
  const OneTokenPlan& plan_;
  /// Of a launch: what ran when CUDA had refused more.
  mutable std::atomic<std::int64_t> most_blocks_{std::numeric_limits<std::int64_t>::max()};
};

}  // namespace fusedmoe::cuda
