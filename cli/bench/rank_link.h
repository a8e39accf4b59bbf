// What ranks tell each other in bench: values of measurements, and how fast the link between
// them is.
#pragma once

#include <string>
#include <vector>

#include "fusedmoe/comm.h"

namespace fusedmoe::cli {

using ValuesByRank = std::vector<std::vector<double>>;

/// Every rank's values. All ranks call it, each with as many.
ValuesByRank gather_values(Communicator& communicator, const std::vector<double>& mine);
/// One value of each rank.
std::vector<double> values_of(const ValuesByRank& all, std::size_t index);
double largest_of(const std::vector<double>& values);

/// What moves bytes between ranks, at its best.
struct RankLink {
  std::string what;  ///< how it was measured
  double bytes_per_second = 0;
};

/// Bytes a second of one long copy on every rank at the same time, the slowest rank's: on the CPU
/// memcpy, on CUDA from the next rank's GPU. Where that belongs to another process, a long message
/// of the data plane.
RankLink measure_link(Communicator& communicator);

}  // namespace fusedmoe::cli
