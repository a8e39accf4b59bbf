// Which rank of how many a process is, and where it runs: what it says of itself when it joins.
#pragma once

#include <chrono>
#include <string>

#include "fusedmoe/comm.h"

namespace fusedmoe::comm {

/// Throws Error for a rank that is none, and for a timeout whose deadline no clock can tell.
void check_place(int rank, int size, std::chrono::milliseconds timeout);
/// Name of this host; "localhost" where the system has none.
std::string host_name();
/// Four lines: host, number of the process, physical id of the device, and whether rows may go
/// through its memory: "maybe", "yes", "no".
std::string describe_place(const CommunicatorOptions& options);

}  // namespace fusedmoe::comm
