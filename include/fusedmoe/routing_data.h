// Index structures built from top-k ids: how many rows each expert gets, and the permutation that
// sorts (token, slot) pairs by expert. Flat slot f = token * topk + j.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fusedmoe/export.h"
#include "fusedmoe/router.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// Views into caller memory of at least routing_data_bytes(); all i32. Slots whose id is -1, out
/// of range, or mapped to -1 by the expert map belong to no row. Rows are in stable order: by
/// local expert, then by flat slot. Duplicate ids in one token give one row each.
struct RoutingData {
  TensorView expert_num_tokens;  ///< (num_local_experts): histogram
  TensorView expert_offsets;     ///< (num_local_experts + 1): exclusive prefix sums; last = rows
  TensorView permuted_to_slot;   ///< (num_tokens * topk): row -> flat slot; -1 behind the last row
  TensorView slot_to_permuted;   ///< (num_tokens * topk): flat slot -> row; -1 where there is none
};

FUSEDMOE_API std::size_t routing_data_bytes(std::int64_t num_tokens, std::int64_t topk,
                                            std::int64_t num_local_experts);

/// Builds the structures in `memory`. topk_ids: (num_tokens, topk) i32. expert_map (num_experts)
/// i32, global -> local or -1, may be undefined (then global = local ids). A negative or too large
/// id never reads the map.
FUSEDMOE_API RoutingData build_routing_data(const TensorView& topk_ids,
                                            const TensorView& expert_map,
                                            std::int64_t num_local_experts, void* memory,
                                            std::size_t memory_bytes);

/// Bit e % 32 of word e / 32 in row t is set when token t chose local expert e. bitmatrix:
/// (num_tokens, ceil(num_local_experts / 32)) i32, overwritten. Duplicates collapse.
FUSEDMOE_API void build_bitmatrix(const TensorView& topk_ids, const TensorView& expert_map,
                                  std::int64_t num_local_experts, const TensorView& bitmatrix);

}  // namespace fusedmoe
