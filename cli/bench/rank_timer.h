// Times phases of work that all ranks begin together.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "fusedmoe/comm.h"

namespace fusedmoe::cli {

/// Pieces of work that follow each other on every rank.
using RankPhases = std::vector<std::function<void()>>;

class RankTimer {
 public:
  struct Limits {
    std::int64_t min_samples;
    double max_seconds;
    /// A phase is recorded, and many replays in a row are timed, so that the host's part does not
    /// count.
    bool graphs;
  };
  RankTimer(Communicator& communicator, Stream stream, const Limits& limits)
      : communicator_(communicator), stream_(stream), limits_(limits) {}

  /// The times of each phase on this rank, in microseconds.
  std::vector<std::vector<double>> samples_us(const RankPhases& phases);
  std::vector<double> medians_us(const RankPhases& phases);
  /// The largest of all ranks, each value by itself.
  std::vector<double> largest(const std::vector<double>& mine) const;
  double largest(double mine) const { return largest(std::vector{mine}).front(); }

 private:
  void start_together();

  Communicator& communicator_;
  Stream stream_;
  Limits limits_;
};

}  // namespace fusedmoe::cli
