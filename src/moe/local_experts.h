// Global expert id -> local expert, on the host and on the device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/host_device.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::core {

/// -1 for ids that are negative, too large, or another rank's.
class LocalExperts {
 public:
  LocalExperts() = default;
  LocalExperts(const TensorView& expert_map, std::int64_t num_local_experts)
      : map_(expert_map ? expert_map.as<const std::int32_t>() : nullptr),
        num_ids_(as_id(expert_map ? expert_map.size(0) : num_local_experts)),
        num_local_experts_(as_id(num_local_experts)) {}

  FUSEDMOE_HD std::int32_t operator()(std::int32_t id) const {
    if (id < 0 || id >= num_ids_) return -1;
    const std::int32_t local = map_ ? map_[id] : id;
    return local >= 0 && local < num_local_experts_ ? local : -1;
  }

 private:
  static std::int32_t as_id(std::int64_t count) {
    return static_cast<std::int32_t>(
        std::min<std::int64_t>(count, std::numeric_limits<std::int32_t>::max()));
  }

  const std::int32_t* map_ = nullptr;
  std::int32_t num_ids_ = 0;
  std::int32_t num_local_experts_ = 0;
};

}  // namespace fusedmoe::core
