// Rows of tokens in the order of their experts.
#pragma once

#include <cstdint>

#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// permuted[slot_to_row[slot]] = rows[slot / topk]; slots of -1 have no row.
struct PermuteRows {
  const void* rows = nullptr;
  std::int64_t row_pitch = 0;  ///< bytes between rows
  void* permuted = nullptr;    ///< rows without gaps
  std::int64_t row_bytes = 0;
  const std::int32_t* slot_to_row = nullptr;  ///< (num_tokens, topk)
  std::int64_t num_tokens = 0;
  std::int64_t topk = 0;
};

/// Follows the kernel that makes slot_to_row, and overlaps it; any addresses and sizes.
void permute_rows(const PermuteRows& args, const Stream& stream);

}  // namespace fusedmoe::cuda
