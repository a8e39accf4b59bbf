// Ranks that the program starts itself: threads, on the CPU or with a GPU each.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "fusedmoe/comm.h"

namespace fusedmoe::cli {

/// Calls function with each rank's communicator, on a thread of its own. "cpu": in memory; "cuda":
/// over NCCL, rank i on cuda:i; "cuda:i": all on one GPU, in its memory. Throws the first rank's
/// Error when one has failed; the others then end too.
void run_local_ranks(int num_ranks, const std::string& device,
                     const std::function<void(std::shared_ptr<Communicator>)>& function);

}  // namespace fusedmoe::cli
