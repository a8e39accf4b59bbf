// Unpermute, weight and reduce: the end of the standard experts.
#pragma once

#include <cstdint>

#include "fusedmoe/tensor.h"
#include "moe/local_experts.h"
#include "moe/row_places.h"

namespace fusedmoe::cuda {

/// output[t] = sum over j of topk_weights[t, j] * row slot_to_permuted[t, j], in slot order and
/// fp32, rounded once; slots without a row are left out. Without slot_to_permuted, row = slot if
/// its expert is local, so the rows of a token are known before GEMM 2 has written them.
struct Combine {
  /// (num_tokens, hidden), of the dtype of the rows or f32, or bf16 or f16 from rows of f32. hidden
  /// and the stride of its rows are multiples of 8; 16-byte aligned.
  TensorView output;
  bool accumulate = false;  ///< add the sum to what the output holds, before the rounding
  /// Where rows of the output go instead, without accumulate, if there are some: those of tokens
  /// that have rows. Of `output` only shape and dtype count then.
  RowTargets targets;
  const void* rows = nullptr;  ///< (splits, rows, hidden); splits are added first
  DType rows_dtype = DType::kF32;
  int splits = 1;
  std::int64_t split_pitch = 0;         ///< elements between splits
  TensorView slot_to_permuted;          ///< (num_tokens * topk) i32, or none
  TensorView topk_ids;                  ///< (num_tokens, topk) i32, without slot_to_permuted
  core::LocalExperts local_experts;     ///< of topk_ids
  const float* topk_weights = nullptr;  ///< (num_tokens, topk); null: rows are weighted already
  std::int64_t topk = 1;
  /// The operation of the stream before is a kernel that waits for the routing data: see launch().
  bool overlap_previous = false;
};
void combine(const Combine& args, const Stream& stream);

}  // namespace fusedmoe::cuda
