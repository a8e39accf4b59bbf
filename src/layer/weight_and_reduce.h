// Weight and reduce: output[t] = sum over j of topk_weights[t, j] * row of slot (t, j).
//
// Sums run in fp32 in slot order and are rounded once. A slot whose id is -1, or mapped to -1 by
// the expert map, is skipped, so whatever its row holds does not matter.
#pragma once

#include <cstdint>

#include "fusedmoe/prepare_finalize.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::layer {

/// Local expert of a global id, or -1: negative id, id outside of the map, mapped to -1, or
/// (without a map) not below num_local_experts.
inline std::int64_t local_expert(std::int32_t id, const TensorView& expert_map,
                                 std::int64_t num_local_experts) {
  if (id < 0) return -1;
  if (!expert_map) return id < num_local_experts ? id : -1;
  return id < expert_map.size(0) ? expert_map.as<const std::int32_t>()[id] : -1;
}

/// fused_output is (num_tokens, hidden) already; copies it unless it is `output` itself.
void copy_reduced(const FinalizeArgs& args);

/// fused_output (num_tokens * topk, hidden) in slot order. With topk = 1 it may be `output`.
void reduce_contiguous(const FinalizeArgs& args);

/// fused_output (num_local_experts, capacity, hidden); slot (t, j) owns row slot_rows[t * topk + j]
/// of its expert.
void reduce_batched(const FinalizeArgs& args, const std::int32_t* slot_rows);

}  // namespace fusedmoe::layer
