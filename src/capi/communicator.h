// What a communicator's handle holds.
#pragma once

#include "capi/status.h"
#include "fusedmoe/comm.h"
#include "fusedmoe_ranks.h"

struct fusedmoe_communicator {
  std::shared_ptr<fusedmoe::Communicator> communicator;
  std::string backend;
  std::string without_peers;  // what map_peers() has said
};
