// The weights of the reference experts: the published ones as they are.
#pragma once

#include <cstdint>
#include <vector>

#include "fusedmoe/weights.h"

namespace fusedmoe::reference {

/// Keeps the published weights as they are, with their owners.
class ReferenceWeights final : public PackedWeights {
 public:
  /// Copies the weights where nobody here owns them.
  ReferenceWeights(Info info, const ExpertWeights& weights);

  std::int64_t nbytes() const override {
    std::int64_t total = 0;
    for (const ExpertWeights& expert : replaced) total += expert.nbytes();
    return total;
  }

  ExpertWeights source;
  std::vector<ExpertWeights> replaced;  // experts that own their memory: copied by pack or repack
};

/// One expert in tensors of its own.
ExpertWeights copy_expert(const ExpertWeights& weights, std::int64_t expert);

}  // namespace fusedmoe::reference
