// The processes of an MPI job as ranks: every process runs the same cases.
#pragma once

#include <cstdlib>
#include <memory>

#include "ranks.h"

namespace fusedmoe::testing {

/// Ranks share memory, unless the environment says that all goes in messages.
inline bool shares() {
  return !std::getenv("FUSEDMOE_TEST_MESSAGES");
}

inline std::shared_ptr<Communicator> make_ranks(std::chrono::milliseconds timeout = kPatient) {
  return make_mpi_communicator({}, {.timeout = timeout, .shared_memory = shares()});
}

/// One for all cases: MPI starts once.
inline const std::shared_ptr<Communicator>& world() {
  static const std::shared_ptr<Communicator> communicator = make_ranks();
  return communicator;
}

}  // namespace fusedmoe::testing
