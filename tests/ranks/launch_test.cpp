// What launchers tell the processes that they start.
#include <gtest/gtest.h>

#include "fusedmoe/comm.h"
#include "fusedmoe/error.h"
#include "ranks.h"
#include "variable.h"

namespace fusedmoe::launch_test {

using testing::errors_of_ranks;
using testing::Variable;

/// Whoever has started this test, here it is nobody.
class LaunchTest : public ::testing::Test {
  const Variable unset_[20] = {Variable("RANK"),
                               Variable("WORLD_SIZE"),
                               Variable("LOCAL_RANK"),
                               Variable("OMPI_COMM_WORLD_RANK"),
                               Variable("OMPI_COMM_WORLD_SIZE"),
                               Variable("OMPI_COMM_WORLD_LOCAL_RANK"),
                               Variable("PMI_RANK"),
                               Variable("PMI_SIZE"),
                               Variable("MPI_LOCALRANKID"),
                               Variable("SLURM_PROCID"),
                               Variable("SLURM_NTASKS"),
                               Variable("SLURM_LOCALID"),
                               Variable("MASTER_ADDR"),
                               Variable("MASTER_PORT"),
                               Variable("TORCHELASTIC_USE_AGENT_STORE"),
                               Variable("LOCAL_WORLD_SIZE"),
                               Variable("OMPI_COMM_WORLD_LOCAL_SIZE"),
                               Variable("MPI_LOCALNRANKS"),
                               Variable("SLURM_STEP_TASKS_PER_NODE"),
                               Variable("FUSEDMOE_TOKEN")};
};

TEST_F(LaunchTest, EveryLauncherIsUnderstood) {
  const struct {
    const char *launcher, *rank, *size, *local, *local_size, *elsewhere;
  } launchers[] = {
      {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "4"},
      {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
      {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "4"},
      {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
       "4(x2)"},
  };
  for (const auto& each : launchers) {
    const Variable rank(each.rank, "5"), size(each.size, "8"), local(each.local, "1");
    const Variable address("MASTER_ADDR", "node7"), port("MASTER_PORT", "29500");
    const auto launch = launch_from_environment();
    ASSERT_TRUE(launch) << each.launcher;
    EXPECT_EQ(launch->launcher, each.launcher);
    EXPECT_EQ(launch->rank, 5);
    EXPECT_EQ(launch->size, 8);
    EXPECT_EQ(launch->local_rank, 1);
    EXPECT_EQ(launch->address, "node7");
    EXPECT_EQ(launch->port, 29500);
    {
      const Variable elsewhere(each.local_size, each.elsewhere);
      EXPECT_EQ(launch_from_environment()->address, "node7");
    }
    const Variable all_here(each.local_size, "8");
    EXPECT_EQ(launch_from_environment()->address, "127.0.0.1") << "nobody else need reach it";
    const Variable token("FUSEDMOE_TOKEN", "sixteen-letters.");
    EXPECT_EQ(launch_from_environment()->address, "node7") << "and nobody else can join";
  }
  EXPECT_FALSE(launch_from_environment());
  {
    const Variable tasks("SLURM_NTASKS", "4");
    EXPECT_FALSE(launch_from_environment()) << "an allocation, but no srun";
  }
  const Variable rank("RANK", "8");
  EXPECT_THROW(launch_from_environment(), Error) << "no size";
  const Variable size("WORLD_SIZE", "8");
  EXPECT_THROW(launch_from_environment(), Error) << "rank 8 of 8";
  const Variable first("RANK", "0"), port("MASTER_PORT", "29500"),
      agent("TORCHELASTIC_USE_AGENT_STORE", "True");
  EXPECT_EQ(launch_from_environment()->port, 29501) << "torchrun itself listens at the other";
}

TEST_F(LaunchTest, WhatIsMissingIsNamedBesideWhatIsThere) {
  const auto error = [] { return errors_of_ranks(1, [](int) { join_processes(); })[0]; };
  const auto has = [&](const char* part) {
    EXPECT_NE(error().find(part), std::string::npos) << error();
  };
  has("no launcher has started this process: not set are RANK and WORLD_SIZE (torchrun), "
      "OMPI_COMM_WORLD_RANK");
  const Variable rank("OMPI_COMM_WORLD_RANK", "1"), size("OMPI_COMM_WORLD_SIZE", "4");
  has("MASTER_ADDR and MASTER_PORT: was not set (set are: OMPI_COMM_WORLD_RANK=1, "
      "OMPI_COMM_WORLD_SIZE=4); must be set on every rank to the host of rank 0");
  const Variable address("MASTER_ADDR", "node7");
  has("MASTER_PORT: was not set (set are: OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4, "
      "MASTER_ADDR=node7); must be");
}

TEST_F(LaunchTest, JoiningNeedsAnAddressAndATimeout) {
  const auto at = [](const char* address, int port) {
    Launch launch{.rank = 1, .size = 2};
    launch.address = address;
    launch.port = port;
    return launch;
  };
  EXPECT_THROW(join_processes(at("", 29500)), Error) << "no address";
  using std::chrono::milliseconds;
  for (const milliseconds timeout : {milliseconds(0), milliseconds(-1), milliseconds::max()}) {
    EXPECT_THROW(make_thread_communicators(1, {timeout}), Error);
    EXPECT_THROW(join_processes(at("127.0.0.1", 1), {timeout}), Error);
    const auto gather = [](const std::string&) { return std::vector<std::string>(2); };
    EXPECT_THROW(make_control_plane(1, 2, gather, timeout), Error);
  }
}

}  // namespace fusedmoe::launch_test
