// Ranks that connect by a library that itself waits for the others without end: where one of them
// cannot, those that still wait learn it at once. Needs neither NCCL nor a device.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "fusedmoe/comm.h"
#include "fusedmoe/error.h"

namespace fusedmoe::cuda {

/// The ranks of a control plane while they connect. "<name>/failed" is where the first that cannot
/// says why, "<name>/<point>/<rank>" who has come how far. They have `timeout` for all of it.
class Connecting {
 public:
  using Clock = std::chrono::steady_clock;

  Connecting(std::string name, int rank, int size, ControlPlane& control,
             std::chrono::milliseconds timeout)
      : name_(std::move(name)), rank_(rank), size_(size), control_(control), timeout_(timeout) {}

  /// Does this rank's part. If it throws, the ranks that still wait throw an Error with its text:
  /// "nccl: rank 1: no cable". So does this rank, but what tells its caller more it throws as it
  /// is: an invalid argument, or no Error at all, as of a wait hook. The control plane stays
  /// usable. Where that has failed, all throw its reason.
  template <typename Part>
  auto run(const Part& part) {
    try {
      return part();
    } catch (const Error& error) {
      const std::string reason = fail();
      if (error.kind() == ErrorKind::kInvalidArgument) throw;
      throw Error::communication(reason);
    } catch (...) {
      fail();
      throw;
    }
  }

  // Within a part:
  /// Throws Error if another rank has failed. To be called every few milliseconds of a wait.
  void check();
  bool is_late() const { return Clock::now() >= deadline_; }
  /// What somebody has posted under this name; empty: nobody did in time.
  std::optional<std::string> read(const std::string& text);
  /// Waits until all ranks have come to this point. One that comes when another has just given up
  /// may not learn that here.
  void meet(std::string_view point);

 private:
  /// In a catch block: tells the others. Returns the first reason, maybe another rank's.
  std::string fail();

  const std::string name_;
  const int rank_, size_;
  ControlPlane& control_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point deadline_ = Clock::now() + timeout_;
};

}  // namespace fusedmoe::cuda
