// Rows in the order of their experts.
#pragma once

#include <cstdint>

#include "cuda/rows/row_transform.h"
#include "fusedmoe/tensor.h"
#include "moe/local_experts.h"

namespace fusedmoe::cuda {

/// to[slot_to_row[slot]] = rows[slot / topk]; slots of -1 have no row.
struct PermuteRows {
  RowTransform rows;
  const std::int32_t* slot_to_row = nullptr;  ///< (num_tokens, topk)
  std::int64_t num_tokens = 0;
  std::int64_t topk = 0;
  const std::int32_t* topk_ids = nullptr;  ///< with rows.differ_by_expert(): (num_tokens, topk)
  core::LocalExperts local_experts;
};

/// Follows the kernel that makes slot_to_row, and overlaps it; copies of any addresses and sizes.
void permute_rows(const PermuteRows& args, const Stream& stream);

/// to[row] = rows[row] for the rows of experts.
struct TransformRows {
  RowTransform rows;
  std::int64_t num_rows = 0;  ///< at most
  int num_experts = 0;
  const std::int32_t* expert_offsets = nullptr;     ///< (experts + 1); or, where rows have a
  const std::int32_t* expert_num_tokens = nullptr;  ///< capacity, (experts)
  std::int64_t capacity = 0;
};

/// Behind one of our kernels, which it overlaps where `overlap_previous` is set.
void transform_rows(const TransformRows& args, bool overlap_previous, const Stream& stream);

}  // namespace fusedmoe::cuda
