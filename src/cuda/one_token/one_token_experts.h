// The host's side of the kernel of one token: which problems it has room for, and its launch.
#pragma once

#include "cuda/gemm/fused_mlp.h"
#include "cuda/gemm/weight_format.h"
#include "cuda/one_token/one_token.h"
#include "cuda/operand_rows.h"
#include "cuda/scratch.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

/// Of one configuration's experts.
class OneTokenExperts {
 public:
  /// `blocks`: of a launch, one for each multiprocessor.
  OneTokenExperts(const MoeConfig& config, const WeightFormat& format, const OperandRows& rows,
                  int blocks)
      : config_(config), format_(format), rows_(rows), blocks_(blocks) {}

  /// Whether the kernel computes the problem.
  bool supports(const ProblemSize& problem) const;
  /// Enqueues it. Of `mlp` it takes the GEMMs, the activation and the quantizer.
  void run(const ForwardArgs& args, const Scratch& scratch, const FusedMlpParams& mlp,
           const ProblemSize& problem) const;

 private:
  OneTokenShape shape_of(const ProblemSize& problem) const;

  const MoeConfig& config_;
  const WeightFormat& format_;
  const OperandRows& rows_;
  const int blocks_;
};

}  // namespace fusedmoe::cuda
