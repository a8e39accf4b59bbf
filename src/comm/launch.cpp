// What launchers tell the processes that they start, in variables of the environment; and how
// these processes join.
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "fusedmoe/comm.h"

namespace fusedmoe {
namespace {

struct Launcher {
  const char *name, *rank, *size, *local_rank;
};

// The first that has set its variables counts: mpirun below Slurm sets both kinds.
constexpr std::array kLaunchers{
    Launcher{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    Launcher{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK"},
    Launcher{"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    Launcher{"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
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
    launch.port = number("MASTER_PORT").value_or(0);
    // torchrun itself listens at that port.
    const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (launch.port > 0 && agent && std::string_view(agent) == "True") ++launch.port;
    return launch;
  }
  return std::nullopt;
}

std::shared_ptr<Communicator> join_processes(std::optional<Launch> launch,
                                             CommunicatorOptions options) {
  if (!launch) launch = launch_from_environment();
  FUSEDMOE_CHECK(launch && !launch->address.empty(), "MASTER_ADDR and MASTER_PORT", "not set",
                 "set by a launcher, or an address given");
  const auto& [rank, size, local_rank, address, port, launcher] = *launch;
  auto control = make_tcp_control_plane(rank, size, address, port, options.timeout);
  return make_communicator(rank, size, std::move(control), options);
}

}  // namespace fusedmoe
