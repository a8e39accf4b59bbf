// Unpermute, weight and reduce: the end of the standard experts.
#pragma once

#include <cstdint>

#include "core/local_experts.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// output[t] = sum over j of topk_weights[t, j] * row slot_to_permuted[t, j], in slot order and
/// fp32, rounded once; slots without a row are left out. Without slot_to_permuted rows are those of
/// the slots, of which only those of a local expert have one: known before the rows are there.
struct Combine {
  TensorView output;           ///< (num_tokens, hidden) bf16 or f16; hidden a multiple of 8
  const void* rows = nullptr;  ///< (splits, rows, hidden), f32 or as output; splits are added first
  bool rows_f32 = false;
  int splits = 1;
  std::int64_t split_pitch = 0;         ///< elements between splits
  TensorView slot_to_permuted;          ///< (num_tokens * topk) i32, or none
  TensorView topk_ids;                  ///< (num_tokens, topk) i32, without slot_to_permuted
  core::LocalExperts local_experts;     ///< of topk_ids
  const float* topk_weights = nullptr;  ///< (num_tokens, topk); null: rows are weighted already
  std::int64_t topk = 1;
  bool overlap_previous = false;  ///< see FusedMlpParams
};
void combine(const Combine& args, const Stream& stream);

}  // namespace fusedmoe::cuda
