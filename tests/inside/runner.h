// Experts on a problem of src/testing, whose weights are packed once.
#pragma once

#include <memory>

#include "fusedmoe/modular_kernel.h"
#include "testing/cases.h"

namespace fusedmoe::testing {

/// Of a name of find_variant(), for several runs on weights that are packed once.
class Runner {
 public:
  Runner(const Problem& problem, const char* variant, DType dtype)
      : kernel_(find_variant(variant).create(make_config(problem.spec, dtype))),
        packed_(kernel_.experts().pack(problem.weights)) {}

  Tensor run(const Problem& problem) const { return run_experts(problem, kernel_, *packed_); }

 private:
  ModularKernel kernel_;
  std::shared_ptr<const PackedWeights> packed_;
};

}  // namespace fusedmoe::testing
