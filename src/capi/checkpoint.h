#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fusedmoe.h"
#include "fusedmoe/checkpoint.h"

struct fusedmoe_checkpoint {
  explicit fusedmoe_checkpoint(fusedmoe::Checkpoint opened);

  fusedmoe::Checkpoint checkpoint;
  std::string family, scheme, activation;
  std::vector<std::int64_t> moe_layers;
};
