// The index structures of routing_data.h on the device, in one launch.
#pragma once

#include <cstdint>

#include "fusedmoe/routing_data.h"

namespace fusedmoe::cuda {

/// As fusedmoe::build_routing_data(): the same views into `memory`, of routing_data_bytes().
/// Besides, `zeroed` words are set to 0. Asynchronous on the stream.
RoutingData build_routing_data(const TensorView& topk_ids, const TensorView& expert_map,
                               std::int64_t num_local_experts, void* memory, std::int32_t* zeroed,
                               std::int64_t num_zeroed, const Stream& stream);

}  // namespace fusedmoe::cuda
