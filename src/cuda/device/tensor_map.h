// Tensor maps of the bulk tensor copy engine (TMA).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fusedmoe::cuda {

/// Rows of 16-bit numbers in device memory, 16-byte aligned.
struct MappedRows {
  const void* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t pitch = 0;  ///< elements, a multiple of 8
};

/// Copies boxes of `box_rows` rows by 64 columns in the 128-byte swizzle; zeros beyond the edges.
/// With `box_k_blocks` above 1 a box is so many of these, 64 columns apart, and coordinates are
/// (0, row, columns / 64); whole blocks of columns only, zeros instead of one that is not.
/// Throws Error when the driver refuses.
CUtensorMap make_tensor_map(const MappedRows& rows, int box_rows, int box_k_blocks = 1);

}  // namespace fusedmoe::cuda
