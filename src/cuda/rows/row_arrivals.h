// Which rows are here while the launch that brings them still runs.
#pragma once

#include <cstdint>

#include "core/ceil_div.h"

namespace fusedmoe::cuda {

struct RowArrivals {
  static constexpr int kRows = 64;  ///< that are counted together

  /// (words(rows)): warps that are done, of the launch that brings the rows, and of each kRows
  /// rows those that are here, where rows behind the last count too. Zero when it begins.
  std::int32_t* counts = nullptr;
  int warps = 0;  ///< of that launch

  static constexpr std::int64_t words(std::int64_t rows) { return 1 + core::ceil_div(rows, kRows); }
};

}  // namespace fusedmoe::cuda
