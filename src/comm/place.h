// Which rank of how many a process is, and where it runs: what it says of itself when it joins.
#pragma once

#include <chrono>
#include <string>

#include "fusedmoe/tensor.h"

namespace fusedmoe::comm {

/// Throws Error for a rank that is none, and for a timeout whose deadline no clock can tell.
void check_place(int rank, int size, std::chrono::milliseconds timeout);
/// Name of this host; "localhost" where the system has none.
std::string host_name();
/// Three lines: host, number of the process, physical id of the device.
std::string describe_place(Device device);

}  // namespace fusedmoe::comm
