// How often the conversions of E4M3 by hand (cuda/device/e4m3_convert.cuh) differ from a GPU's
// instructions: of all that there is to convert.
#pragma once

#include <cstdint>

namespace fusedmoe::testing {

struct E4m3Differences {
  std::uint64_t of_f32 = 0;    ///< codes of the 2^32 numbers of 32 bits, each first and second
  std::uint64_t of_f16 = 0;    ///< codes of the 2^16 numbers of 16 bits
  std::uint64_t of_codes = 0;  ///< numbers of all pairs of codes; NaN is NaN
};

/// Whether the current GPU has code here, with those instructions.
bool can_count_e4m3_differences();
E4m3Differences count_e4m3_differences();

}  // namespace fusedmoe::testing
