// What MPI has begun and nobody waits for any more.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace fusedmoe::mpi {

/// What MPI has begun, and the memory that it uses.
struct Operation {
  MPI_Request request = MPI_REQUEST_NULL;
  std::shared_ptr<void> memory;
};

/// The ranks of a communicator, by their numbers in MPI_COMM_WORLD.
inline std::vector<int> world_ranks(MPI_Comm comm) {
  MPI_Group world = MPI_GROUP_NULL, own = MPI_GROUP_NULL;
  int size = 0;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Comm_group(comm, &own);
  MPI_Group_size(own, &size);
  std::vector<int> ranks(static_cast<std::size_t>(size)), numbers(ranks);
  std::iota(ranks.begin(), ranks.end(), 0);
  MPI_Group_translate_ranks(own, size, ranks.data(), world, numbers.data());
  MPI_Group_free(&own);
  MPI_Group_free(&world);
  return numbers;
}

class LeftBehind {
 public:
  /// `peers`, by their numbers in MPI_COMM_WORLD, may have stopped.
  void add(Operation operation, std::vector<int> peers) {
    const std::lock_guard lock(mutex_);
    left_.push_back({std::move(operation), std::move(peers)});
  }
  /// These have met since, so they live.
  void ranks_have_met(std::span<const int> ranks) {
    const std::lock_guard lock(mutex_);
    forget_ended();
    for (Left& each : left_) {
      std::erase_if(each.peers, [&](int peer) {
        return std::find(ranks.begin(), ranks.end(), peer) != ranks.end();
      });
    }
  }
  /// MPI still works for a peer that may have stopped.
  bool waits_for_peer() {
    const std::lock_guard lock(mutex_);
    forget_ended();
    return std::any_of(left_.begin(), left_.end(),
                       [](const Left& each) { return !each.peers.empty(); });
  }

 private:
  struct Left {
    Operation operation;
    std::vector<int> peers;  // that may have stopped
  };
  void forget_ended() {
    std::erase_if(left_, [](Left& each) {
      int ended = 0;
      const int code = MPI_Test(&each.operation.request, &ended, MPI_STATUS_IGNORE);
      return code != MPI_SUCCESS || ended;
    });
  }
  std::mutex mutex_;
  std::vector<Left> left_;
};

}  // namespace fusedmoe::mpi
