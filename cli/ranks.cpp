#include "ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>
#include <vector>

#include "command_line.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe::cli {
namespace {

constexpr std::chrono::seconds kTimeout{60};

/// Called by each rank's thread: over NCCL they wait for each other.
std::shared_ptr<Communicator> join_nccl(int rank, int num_ranks,
                                        const std::shared_ptr<ControlPlane>& control) {
  const Device device{DeviceKind::kCuda, rank};
  return std::make_shared<Communicator>(
      rank, num_ranks, control, make_nccl_data_plane(rank, num_ranks, device, control, kTimeout),
      CommunicatorOptions{kTimeout, device});
}

}  // namespace

void RankOptionsOf::add_to(Command& command) {
  command
      .add_option("--ep", ep, "Share the experts among so many ranks, --tp x --dp of them if given")
      .between(1, 4096);
  command
      .add_option("--tp", tp,
                  "Ranks with the same tokens, which share every expert, or with "
                  "--ep the experts")
      .between(1, 4096);
  command.add_option("--dp", dp, "Groups of --tp ranks with tokens of their own").between(1, 4096);
}

int RankOptionsOf::num_ranks() const {
  return deployment(0).tp_size * deployment(0).dp_size;
}

Deployment RankOptionsOf::deployment(int rank) const {
  const int groups = dp > 0 ? dp : std::max(1, ep / tp);
  if (ep > 0 && tp * groups != ep) {
    throw Error("--ep", fmt::format("{}", ep), fmt::format("{}, --tp x --dp", tp * groups));
  }
  return {tp, groups, ep > 0, false, rank};
}

void run_local_ranks(int num_ranks, const std::string& device,
                     const std::function<void(std::shared_ptr<Communicator>)>& function) {
  const bool nccl = device == "cuda";
  if (nccl && num_ranks > cuda_device_count()) {
    throw Error(
        "--ep", fmt::format("{}", num_ranks),
        fmt::format("at most {}, the GPUs here; --device cuda:0 shares one", cuda_device_count()));
  }
  // Without NVLink's multicast, which is not available in every machine; read when NCCL is loaded.
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  const std::shared_ptr<ControlPlane> control = make_thread_control_plane();
  std::vector<std::shared_ptr<Communicator>> made;
  if (!nccl) made = make_thread_communicators(num_ranks, {kTimeout, parse_device(device)});
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::shared_ptr<Communicator> communicator = nccl ? nullptr : made[rank];
      try {
        if (nccl) communicator = join_nccl(rank, num_ranks, control);
        function(communicator);
        communicator->barrier();
      } catch (const std::exception& error) {
        failures[rank] = std::current_exception();
        if (communicator) communicator->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace fusedmoe::cli
