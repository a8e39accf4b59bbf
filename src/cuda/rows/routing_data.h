// RoutingData (router.h) on the device: the slots sorted by expert. One launch makes it, or two
// where many rows are permuted as well.
#pragma once

#include <cstdint>

#include "cuda/rows/row_transform.h"
#include "fusedmoe/router.h"
#include "moe/backend.h"

namespace fusedmoe::cuda {

/// What else the launch does.
struct RoutingDataExtras {
  std::int32_t* zeroed = nullptr;  ///< words that are set to 0
  std::int64_t num_zeroed = 0;
  /// Rows in the order of their experts: to[r] = rows[slot / topk] of its slot. Where `to` is null
  /// nothing is written. Addresses, row_bytes and pitches are multiples of 16 bytes; the scale of a
  /// whole tensor must be known.
  RowTransform rows;
};

/// As fusedmoe::build_routing_data(): the same views into `memory`, of routing_data_bytes().
/// Asynchronous on the stream. Up to 16384 local experts.
RoutingData build_routing_data(const TensorView& topk_ids, const TensorView& expert_map,
                               std::int64_t num_local_experts, void* memory,
                               const RoutingDataExtras& extras, const Stream& stream);

/// As core::Backend::assign_rows(): the rows of the batched format.
void assign_rows(const TensorView& topk_ids, const TensorView& expert_map,
                 const core::RowAssignment& out, Stream stream);

/// The views of the routing data in `memory`.
RoutingData routing_data_views(const TensorView& topk_ids, std::int64_t num_local_experts,
                               void* memory);

}  // namespace fusedmoe::cuda
