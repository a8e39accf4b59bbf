// The schemes whose weights the CPU experts have tiles for.
#pragma once

#include <vector>

#include "cpu/pack.h"
#include "fusedmoe/quant.h"

namespace fusedmoe {

/// All but those with f16 weights, which the CPU experts refuse.
inline std::vector<NamedScheme> schemes_with_codes() {
  std::vector<NamedScheme> result;
  for (const NamedScheme& entry : named_schemes()) {
    if (cpu::has_codes(entry.scheme.weights)) result.push_back(entry);
  }
  return result;
}

}  // namespace fusedmoe
