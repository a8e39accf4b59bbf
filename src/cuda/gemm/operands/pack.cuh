// What the packing kernels of all formats share.
#pragma once

#include <cstdint>

#include "cuda/gemm/weight_format.h"

namespace fusedmoe::cuda {

inline constexpr int kPackThreads = 128;

/// The source row of a packed row; -1 for padding.
__device__ inline std::int64_t source_row(const PackSource& s, std::int64_t row) {
  if (!s.gated) return row < s.width ? row : -1;
  const std::int64_t feature = gated_feature(row);
  if (feature >= s.width) return -1;
  return gated_is_up(row) ? s.width + feature : feature;
}

}  // namespace fusedmoe::cuda
