// Which expert a row belongs to, on the device.
#pragma once

#include "cuda/rows/permute.h"

namespace fusedmoe::cuda {

/// -1 for none: a search that all threads of a block do alike.
__device__ inline int expert_of_row(const TransformRows& p, std::int64_t row) {
  if (!p.expert_offsets) {
    const auto expert = static_cast<int>(row / p.capacity);
    return row % p.capacity < p.expert_num_tokens[expert] ? expert : -1;
  }
  if (row >= p.expert_offsets[p.num_experts]) return -1;
  int first = 0, last = p.num_experts - 1;  // the last expert that begins at or before the row
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (p.expert_offsets[middle] <= row) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

}  // namespace fusedmoe::cuda
