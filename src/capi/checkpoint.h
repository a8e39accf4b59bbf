#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fusedmoe.h"
#include "fusedmoe/checkpoint.h"

struct fusedmoe_checkpoint {
  explicit fusedmoe_checkpoint(fusedmoe::Checkpoint opened);

  fusedmoe::Checkpoint checkpoint;
  std::string family, scheme, activation;
  std::vector<std::int64_t> moe_layers;
  mutable std::mutex mutex;
  mutable std::map<std::int64_t, std::string> schemes;  ///< those that were asked for
};
