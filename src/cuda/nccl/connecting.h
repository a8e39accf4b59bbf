// Ranks that connect by a library that itself waits for the others without end: where one of them
// cannot, all learn it at once. Needs neither NCCL nor a device.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "fusedmoe/comm.h"

namespace fusedmoe::cuda {

/// The ranks of a control plane while they connect. "<name>/failed" is where the first that cannot
/// says why, "<name>/<point>/<rank>" who has come how far.
class Connecting {
 public:
  using Clock = std::chrono::steady_clock;

  Connecting(std::string name, int rank, int size, ControlPlane& control,
             std::chrono::milliseconds timeout)
      : name_(std::move(name)), rank_(rank), size_(size), control_(control), timeout_(timeout) {}

  /// Does this rank's part. If a rank's part throws, all throw an Error with that rank's text:
  /// "nccl: rank 1: no cable". The control plane stays usable.
  template <typename Part>
  auto run(const Part& part) {
    try {
      return part();
    } catch (...) {
      fail();
    }
  }

  // Within a part:
  /// Throws Error if another rank has failed. To be called every few milliseconds of a wait.
  void check();
  /// What somebody has posted under this name; empty: nobody did in time.
  std::optional<std::string> read(const std::string& text, Clock::time_point deadline);
  /// Waits until all ranks have come to this point.
  void meet(std::string_view point);

 private:
  /// In a catch block.
  [[noreturn]] void fail();

  const std::string name_;
  const int rank_, size_;
  ControlPlane& control_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace fusedmoe::cuda
