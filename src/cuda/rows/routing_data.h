// The index structures of routing_data.h on the device, in one launch, two where there are many
// rows to copy.
#pragma once

#include <cstdint>

#include "fusedmoe/router.h"

namespace fusedmoe::cuda {

/// What else the launch does.
struct RoutingDataExtras {
  std::int32_t* zeroed = nullptr;  ///< words that are set to 0
  std::int64_t num_zeroed = 0;
  /// Rows in the order of the grouped GEMM: permuted[r] = rows[slot / topk] of its slot. Where
  /// `permuted` is null nothing is copied. 16-byte aligned, row_bytes a multiple of 16.
  const void* rows = nullptr;
  void* permuted = nullptr;
  std::int64_t row_bytes = 0;
};

/// As fusedmoe::build_routing_data(): the same views into `memory`, of routing_data_bytes().
/// Asynchronous on the stream.
RoutingData build_routing_data(const TensorView& topk_ids, const TensorView& expert_map,
                               std::int64_t num_local_experts, void* memory,
                               const RoutingDataExtras& extras, const Stream& stream);

}  // namespace fusedmoe::cuda
