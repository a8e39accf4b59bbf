// Where a rank runs, as it tells the others when it joins.
#pragma once

#include <string>

#include "fusedmoe/tensor.h"

namespace fusedmoe::comm {

/// Name of this host; "localhost" where the system has none.
std::string host_name();
/// Three lines: host, number of the process, device.
std::string describe_place(Device device);

}  // namespace fusedmoe::comm
