// Random numbers for tests and synthesized weights.
#pragma once

#include <cstdint>

namespace fusedmoe::testing {

/// Deterministic random numbers, the same on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed);
  std::uint64_t bits();
  std::int64_t below(std::int64_t limit);  ///< uniform in [0, limit)
  double uniform();                        ///< [0, 1)
  double normal();                         ///< mean 0, variance 1, within +-6

 private:
  std::uint64_t state_;
};

}  // namespace fusedmoe::testing
