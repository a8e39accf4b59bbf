// Labels: what ranks say of an exchange, so that ranks that do not do the same fail. Without them
// NCCL would mix rows of different layers where these have the same sizes.
//
// A label travels in the same group as the messages. The device reads and writes it in host memory,
// which is compared later: the host waits for nothing.
#pragma once

#include <array>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/comm.h"

namespace fusedmoe::cuda {

struct Label {
  std::array<char, 56> what{};  // "dispatch of step 12 of layer 3", then at least one zero
  std::uint64_t bytes = 0;      // from one rank to the other
  Label() = default;
  explicit Label(std::string_view name) { name.copy(what.data(), what.size() - 1); }
  bool operator==(const Label&) const = default;
};

/// Those of one rank. Several threads may use it.
class Labels {
 public:
  /// Those of one exchange, for each rank.
  struct Slot {
    std::span<Label> sent, received;  // where the device reads and writes
    std::vector<Label> expected;      // what `received` is from the start: only others change it
  };

  /// The same before they have a slot.
  struct Pairs {
    std::vector<Label> sent, expected;
  };

  Labels(int rank, int size, Device device);

  /// `recorded`: a graph records the exchange. Its slot is never given back, and equal ones share
  /// it.
  Slot& take(const Pairs& pairs, bool recorded);
  void give_back(Slot& slot);
  /// How what has been received differs from what is expected; empty: not at all.
  std::string difference(const Slot& slot) const;
  std::string difference_of_recorded() const;

 private:
  void add_slots();

  const int rank_, size_;
  const Device device_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<void>> memory_;
  std::deque<Slot> slots_;
  std::vector<Slot*> free_, recorded_;
};

}  // namespace fusedmoe::cuda
