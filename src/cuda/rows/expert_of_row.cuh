// Which expert a row belongs to, on the device.
#pragma once

#include "cuda/rows/permute.h"

namespace fusedmoe::cuda {

/// Whether it is a row of an expert.
__device__ inline bool has_expert(const TransformRows& p, std::int64_t row) {
  return p.expert_offsets ? row < p.expert_offsets[p.num_experts]
                          : row % p.capacity < p.expert_num_tokens[row / p.capacity];
}

/// Of a row that has one: a search that all threads of a block do alike.
__device__ inline int expert_of_row(const TransformRows& p, std::int64_t row) {
  if (!p.expert_offsets) return static_cast<int>(row / p.capacity);
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
