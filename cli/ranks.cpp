#include "ranks.h"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>
#include <vector>

#include "command_info.h"
#include "command_line.h"
#include "core/exception_text.h"
#include "fusedmoe/runtime.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

/// Not every machine has NVLink's multicast. Read when NCCL is loaded.
void avoid_multicast() {
  setenv("NCCL_NVLS_ENABLE", "0", 0);
}

/// Of a job of mpirun: over MPI, where this program has it.
bool over_mpi(const Launch& launch) {
  const bool has_mpi = mpi_summary() != "built without MPI";
  return has_mpi && launch.launcher != "torchrun" && launch.port == 0;
}

/// CPU threads of this rank, where it is a thread of run_local_ranks(); else 0.
thread_local int threads_of_local_rank = 0;

/// Binds the calling thread, and so the threads that it starts, to the rank's share of the cores,
/// as mpirun does. Otherwise two ranks may share a core, and one spins there while the other has
/// work.
void bind_to_share(int rank, int num_ranks) {
  cpu_set_t all, mine;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  const int cores = CPU_COUNT(&all);
  if (cores < num_ranks) return;
  CPU_ZERO(&mine);
  for (int core = 0, i = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &all)) continue;
    if (i++ * num_ranks / cores == rank) CPU_SET(core, &mine);
  }
  sched_setaffinity(0, sizeof mine, &mine);
}

std::shared_ptr<Communicator> join(const Launch& launch, const std::string& device,
                                   std::chrono::seconds timeout, std::optional<bool> peer_memory) {
  const bool nccl = device == "cuda";
  if (!nccl && device != "cpu") {
    throw Error("--device", device, "cpu, or cuda with a GPU for each rank");
  }
  if (nccl) avoid_multicast();
  const Device own = nccl ? Device{DeviceKind::kCuda, launch.local_rank} : Device{};
  if (over_mpi(launch)) {
    auto over = make_mpi_communicator({}, {timeout});
    if (!nccl) return over;
    const auto gather = [&](const std::string& text) { return over->gather(text, "joining"); };
    const int rank = launch.rank, size = launch.size;
    return make_communicator(rank, size, make_control_plane(rank, size, gather, timeout),
                             {timeout, own, true, peer_memory});
  }
  return join_processes(launch, {timeout, own, true, peer_memory});
}

}  // namespace

void RankOptionsOf::add_to(Command& command) {
  command
      .add_option(
          "--ep", ep, "N",
          "Share the experts among so many ranks, --tp x --dp of them if given: threads, or the "
          "processes of mpirun, torchrun or srun")
      .between(1, 4096);
  command
      .add_option("--tp", tp, "N",
                  "Ranks with the same tokens, which share every expert, or with "
                  "--ep the experts")
      .between(1, 4096);
  command.add_option("--dp", dp, "N", "Groups of --tp ranks with tokens of their own")
      .between(1, 4096);
  add_dispatch_dtype(command, dispatch_dtype);
}

std::optional<DType> RankOptionsOf::dispatched() const {
  if (!dispatch_dtype.empty() && num_ranks() == 1) {
    throw Error::invalid("--dispatch-dtype",
                         "--dispatch-dtype needs several ranks: --ep, --tp or --dp");
  }
  return parse_dispatch_dtype(dispatch_dtype);
}

Option RankOptionsOf::add_no_peer_memory(Command& command) {
  return command.add_flag("--no-peer-memory", no_peer_memory,
                          "On GPUs of one host: let rows go over NCCL, not through the memory of "
                          "the GPUs");
}

std::optional<bool> RankOptionsOf::peer_memory() const {
  if (!no_peer_memory) return std::nullopt;
  if (num_ranks() == 1) {
    throw Error::invalid("--no-peer-memory",
                         "--no-peer-memory needs several ranks: --ep, --tp or --dp");
  }
  return false;
}

void add_dispatch_dtype(Command& command, std::string& value) {
  command.add_option("--dispatch-dtype", value, "DTYPE",
                     "Dtype of rows that are sent to other ranks: that of the hidden states, or of "
                     "the activations (e4m3, i8, e2m1); default: what the experts read, and on "
                     "GPUs of one host what is predicted to be faster");
}

std::optional<DType> parse_dispatch_dtype(const std::string& text) {
  if (text.empty()) return std::nullopt;
  const std::vector<std::string> words = find_kind("DTYPE")->words();
  const bool is_word = std::find(words.begin(), words.end(), text) != words.end();
  const std::optional<DType> dtype = is_word ? parse_dtype(text) : std::nullopt;
  if (!dtype) throw Error("--dispatch-dtype", text, "f32, bf16, f16, e4m3, i8 or e2m1");
  return dtype;
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

const std::optional<Launch>& launched() {
  static const std::optional<Launch> launch = [] {
    std::optional<Launch> found = launch_from_environment();
    if (found && found->size == 1) found.reset();
    return found;
  }();
  return launch;
}

void run_rank(const std::shared_ptr<Communicator>& communicator, const RankFunction& function) {
  try {
    function(communicator);
    communicator->barrier();
  } catch (...) {
    communicator->abort(core::current_exception_text());
    throw;
  }
}

void run_local_ranks(int num_ranks, const std::string& device, const RankFunction& function,
                     std::chrono::seconds timeout, std::optional<bool> peer_memory) {
  const bool nccl = device == "cuda";
  if (nccl && num_ranks > cuda_device_count()) {
    throw Error(
        "--ep", fmt::format("{}", num_ranks),
        fmt::format("at most {}, the GPUs here; --device cuda:0 shares one", cuda_device_count()));
  }
  avoid_multicast();
  const std::shared_ptr<ControlPlane> control = make_thread_control_plane();
  std::vector<std::shared_ptr<Communicator>> made;
  if (!nccl)
    made = make_thread_communicators(num_ranks, {timeout, parse_device(device), true, peer_memory});
  const int threads_of_each = std::max(1, num_threads() / num_ranks);
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  threads.reserve(failures.size());
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      threads_of_local_rank = threads_of_each;
      if (!nccl) bind_to_share(rank, num_ranks);
      std::shared_ptr<Communicator> communicator = nccl ? nullptr : made[rank];
      try {
        if (nccl) {
          // By each rank's thread: over NCCL they wait for each other.
          const Device own{DeviceKind::kCuda, rank};
          communicator =
              make_communicator(rank, num_ranks, control, {timeout, own, true, peer_memory});
        }
        run_rank(communicator, function);
      } catch (...) {
        failures[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

void run_on_ranks(int num_ranks, const std::string& device, const RankFunction& function,
                  std::chrono::seconds timeout, std::optional<bool> peer_memory) {
  const std::optional<Launch>& launch = launched();
  if (!launch) return run_local_ranks(num_ranks, device, function, timeout, peer_memory);
  put_rank_in_front(launch->rank);
  if (launch->size != num_ranks) {
    throw Error::invalid("--ep, --tp and --dp",
                         fmt::format("--ep, --tp and --dp make {} ranks, but {} has started {} "
                                     "processes",
                                     num_ranks, launch->launcher, launch->size));
  }
  run_rank(join(*launch, device, timeout, peer_memory), function);
}

int threads_of_rank(const Communicator& communicator) {
  if (threads_of_local_rank > 0) return threads_of_local_rank;
  // A launcher may have bound each process to cores of its own.
  const bool bound = launched() && num_threads() < sysconf(_SC_NPROCESSORS_ONLN);
  const auto ranks = static_cast<int>(communicator.ranks_of_host().size());
  return bound ? num_threads() : std::max(1, num_threads() / ranks);
}

}  // namespace fusedmoe::cli
