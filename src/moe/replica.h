// Which replica of an expert a token goes to, on the host and on the device.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "moe/backend.h"

namespace fusedmoe::core {

class ReplicaTable {
 public:
  ReplicaTable() = default;
  explicit ReplicaTable(const TokenDestinations& destinations)
      : offsets_(destinations.replica_offsets.as<const std::int32_t>()),
        replicas_(destinations.replicas.as<const std::int32_t>()),
        ranks_(destinations.physical_ranks.as<const std::int32_t>()),
        num_experts_(static_cast<std::int32_t>(destinations.replica_offsets.numel() - 1)),
        nearest_rank_(destinations.nearest_rank) {}

  /// The physical expert of a token's slot; -1 for an id that is no expert's. One hash for all
  /// slots of a token, the one of vLLM's router.
  FUSEDMOE_HD std::int32_t choose(std::int32_t id, std::int64_t token) const {
    if (id < 0 || id >= num_experts_) return -1;
    const std::int32_t begin = offsets_[id], count = offsets_[id + 1] - begin;
    for (std::int32_t i = 0; nearest_rank_ >= 0 && i < count; ++i) {
      if (ranks_[replicas_[begin + i]] == nearest_rank_) return replicas_[begin + i];
    }
    const std::uint32_t hash = static_cast<std::uint32_t>(token) * 2654435769u;
    return replicas_[begin + static_cast<std::int32_t>(hash % static_cast<std::uint32_t>(count))];
  }

 private:
  const std::int32_t* offsets_ = nullptr;
  const std::int32_t* replicas_ = nullptr;
  const std::int32_t* ranks_ = nullptr;
  std::int32_t num_experts_ = 0;
  std::int32_t nearest_rank_ = -1;
};

}  // namespace fusedmoe::core
