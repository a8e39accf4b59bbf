// What tests of ranks that are processes share: each runs the disabled test OneProcess of the
// program.
#pragma once

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "../ranks/ranks.h"
#include "../unit/temporary_directory.h"

namespace fusedmoe::testing {

inline constexpr const char* kRank = "FUSEDMOE_TEST_RANK";
inline constexpr const char* kSize = "FUSEDMOE_TEST_SIZE";
inline constexpr const char* kFolder = "FUSEDMOE_TEST_FOLDER";

/// The ranks find each other by files, which takes two rounds; one more is left for the test. They
/// notice who dies by their connections.
inline GatherCallback gather_by_files(const std::filesystem::path& folder, int rank, int size) {
  return [folder, rank, size](const std::string& text) {
    static int round = 0;
    const auto files = make_file_control_plane((folder / std::to_string(round++)).string());
    files->post(std::to_string(rank), text);
    std::vector<std::string> texts;
    for (int r = 0; r < size; ++r)
      texts.push_back(files->read(std::to_string(r), kPatient).value());
    return texts;
  };
}

/// Starts them; they meet in the folder. Returns how they have ended. `as_rank`: a variable that is
/// the rank, too.
inline std::vector<int> run_processes(int size, const std::filesystem::path& folder,
                                      const char* as_rank = kRank) {
  for (const char* round : {"0", "1", "2"}) std::filesystem::create_directory(folder / round);
  setenv(kFolder, folder.c_str(), 1);
  setenv(kSize, std::to_string(size).c_str(), 1);
  std::vector<pid_t> processes(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    for (const char* name : {kRank, as_rank}) setenv(name, std::to_string(rank).c_str(), 1);
    const char* arguments[] = {"rank", "--gtest_filter=*DISABLED_OneProcess",
                               "--gtest_also_run_disabled_tests", nullptr};
    EXPECT_EQ(posix_spawn(&processes[rank], "/proc/self/exe", nullptr, nullptr,
                          const_cast<char**>(arguments), environ),
              0);
  }
  std::vector<int> statuses(processes.size(), -1);
  unsetenv(as_rank);
  for (int rank = 0; rank < size; ++rank) waitpid(processes[rank], &statuses[rank], 0);
  return statuses;
}

inline bool has_ended_well(int status) {
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Where a rank that is not lost writes why its communicator has ended.
inline std::filesystem::path error_file(const std::filesystem::path& folder, int rank) {
  return folder / ("error" + std::to_string(rank));
}
inline std::string error_in(const std::filesystem::path& folder, int rank) {
  std::ifstream file(error_file(folder, rank));
  return {std::istreambuf_iterator<char>(file), {}};
}

/// One must be killed; the others must end well and have written why.
inline void expect_that_a_killed_rank_is_told(const char* as_rank = kRank, int killed = 1,
                                              int size = 2) {
  const TemporaryDirectory folder;
  const std::vector<int> statuses = run_processes(size, folder.path(), as_rank);
  for (int rank = 0; rank < size; ++rank) {
    if (rank == killed) {
      EXPECT_TRUE(WIFSIGNALED(statuses[rank]) && WTERMSIG(statuses[rank]) == SIGKILL);
      continue;
    }
    EXPECT_TRUE(has_ended_well(statuses[rank])) << rank;
    EXPECT_EQ(error_in(folder.path(), rank),
              "rank " + std::to_string(killed) + " has died or lost its connection");
  }
}

}  // namespace fusedmoe::testing
