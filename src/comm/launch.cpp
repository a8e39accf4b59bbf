// What launchers tell the processes that they start, in variables of the environment; and how
// these processes join.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "comm/later_data.h"
#include "comm/place.h"
#include "comm/poll.h"
#include "comm/token.h"
#include "core/check.h"
#include "core/exception_text.h"

namespace fusedmoe {
namespace {

struct Launcher {
  const char *name, *rank, *size, *local_rank;
  const char* local_size;  // the same text as `size` where all ranks are on this host
};

// The first that has set its variables counts: mpirun below Slurm sets both kinds.
constexpr std::array kLaunchers{
    Launcher{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    Launcher{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    Launcher{"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    Launcher{"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
};

std::optional<int> number(const char* name) {
  const char* text = std::getenv(name);
  if (!text || !*text) return std::nullopt;
  int value = -1;
  const char* end = text + std::strlen(text);
  const auto [stop, problem] = std::from_chars(text, end, value);
  FUSEDMOE_CHECK(problem == std::errc() && stop == end && value >= 0, name,
                 core::format("\"{}\"", text), "a number that is not negative");
  return value;
}

bool is_one_host(const Launcher& launcher) {
  const char* local = std::getenv(launcher.local_size);
  const char* all = std::getenv(launcher.size);
  return local && all && std::string_view(local) == all;
}

/// "RANK=0, MASTER_ADDR=node7": what is set of these.
std::string what_is_set(std::span<const char* const> names) {
  std::vector<std::string> found;
  for (const char* name : names) {
    if (const char* text = std::getenv(name)) found.push_back(core::format("{}={}", name, text));
  }
  return core::join(found, ", ");
}

/// Checks that `launch` has the address of rank 0. Else throws an Error that says which variables
/// are set, which are missing, and how to set them.
void check_address(const std::optional<Launch>& launch) {
  if (!launch) {
    std::vector<std::string> missing;
    missing.reserve(std::size(kLaunchers));
    for (const Launcher& each : kLaunchers) {
      missing.push_back(core::format("{} and {} ({})", each.rank, each.size, each.name));
    }
    throw Error::invalid(
        "launcher",
        core::format(
            "no launcher has started this process: not set are {}; start it with torchrun, "
            "mpirun or srun, or give rank, size, address and port",
            core::join(missing, ", ")));
  }
  const auto launcher =
      std::find_if(kLaunchers.begin(), kLaunchers.end(),
                   [&](const Launcher& each) { return each.name == launch->launcher; });
  if (launcher == kLaunchers.end()) {  // the caller says where rank 0 is
    FUSEDMOE_CHECK(!launch->address.empty(), "launch.address", "empty", "the host of rank 0");
    return;
  }
  std::vector<std::string> missing;
  if (launch->address.empty()) missing.emplace_back("MASTER_ADDR");
  if (launch->port == 0) missing.emplace_back("MASTER_PORT");
  if (missing.empty()) return;
  const std::array related{launcher->rank, launcher->size, "MASTER_ADDR", "MASTER_PORT"};
  throw Error(core::join(missing, " and "),
              core::format("not set (set are: {})", what_is_set(related)),
              "set on every rank to the host of rank 0 and a free port there, as in "
              "\"MASTER_ADDR=node1 MASTER_PORT=29500 srun ...\" or "
              "\"mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ...\"");
}

}  // namespace

std::optional<Launch> launch_from_environment() {
  for (const Launcher& launcher : kLaunchers) {
    const std::optional<int> rank = number(launcher.rank), size = number(launcher.size);
    if (!rank && !size) continue;
    // An allocation without srun says only how many tasks there may be.
    if (!rank && launcher.name == std::string_view("Slurm")) continue;
    FUSEDMOE_CHECK(rank && size, rank ? launcher.size : launcher.rank, "not set",
                   core::format("set, as {} is", rank ? launcher.rank : launcher.size));
    FUSEDMOE_CHECK(*rank < *size, launcher.rank, core::to_string(*rank),
                   core::format("below {} ({})", *size, launcher.size));
    Launch launch;
    launch.rank = *rank;
    launch.size = *size;
    launch.local_rank = number(launcher.local_rank).value_or(0);
    launch.launcher = launcher.name;
    if (const char* address = std::getenv("MASTER_ADDR")) launch.address = address;
    if (is_one_host(launcher) && comm::Token::given({}).empty()) launch.address = "127.0.0.1";
    launch.port = number("MASTER_PORT").value_or(0);
    // torchrun itself listens at that port.
    const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (launch.port > 0 && agent && std::string_view(agent) == "True") ++launch.port;
    return launch;
  }
  return std::nullopt;
}

std::shared_ptr<Communicator> make_communicator(int rank, int size,
                                                std::shared_ptr<ControlPlane> control,
                                                CommunicatorOptions options,
                                                const CallersNccl& nccl) {
  FUSEDMOE_CHECK_FAULT(control, kNull, "control", "null", "a control plane");
  std::shared_ptr<DataPlane> data;
  try {
    comm::check_place(rank, size, options.timeout);
    if (options.device.is_cpu()) {
      FUSEDMOE_CHECK(!nccl.comm && nccl.unique_id.empty(), "options.device",
                     "cpu, with nccl_comm or nccl_unique_id", "a CUDA device");
      data = make_tcp_data_plane(rank, size, control, options.timeout);
    } else if (nccl.comm || !nccl.unique_id.empty()) {
      data = make_nccl_data_plane(rank, size, options.device, control, options.timeout, nccl);
    } else {
      data = std::make_shared<comm::LaterData>("nccl", options.device, [=] {
        return make_nccl_data_plane(rank, size, options.device, control, options.timeout);
      });
    }
  } catch (...) {
    comm::post_failure(*control, rank, core::current_exception_text());
    throw;
  }
  return std::make_shared<Communicator>(rank, size, std::move(control), std::move(data), options);
}

std::shared_ptr<Communicator> join_processes(std::optional<Launch> launch,
                                             CommunicatorOptions options) {
  if (!launch) launch = launch_from_environment();
  check_address(launch);
  const auto& [rank, size, local_rank, address, port, launcher, token] = *launch;
  auto control = make_tcp_control_plane(rank, size, address, port, options.timeout, token);
  return make_communicator(rank, size, std::move(control), options);
}

}  // namespace fusedmoe
