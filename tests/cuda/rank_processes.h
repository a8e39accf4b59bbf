// What tests of ranks that are processes share: two of them, which run the disabled test OneProcess
// of the program.
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
inline constexpr const char* kFolder = "FUSEDMOE_TEST_FOLDER";

/// The ranks find each other by files, which takes two rounds; one more is left for the test. They
/// notice who dies by their connections.
inline GatherCallback gather_by_files(const std::filesystem::path& folder, int rank) {
  return [folder, rank](const std::string& text) {
    static int round = 0;
    const auto files = make_file_control_plane((folder / std::to_string(round++)).string());
    files->post(std::to_string(rank), text);
    std::vector<std::string> texts;
    for (int r = 0; r < 2; ++r) texts.push_back(files->read(std::to_string(r), kPatient).value());
    return texts;
  };
}

/// Starts both, which meet in the folder. Returns how they have ended. `as_rank`: a variable that
/// is the rank, too.
inline std::vector<int> run_two_processes(const std::filesystem::path& folder,
                                          const char* as_rank = kRank) {
  for (const char* round : {"0", "1", "2"}) std::filesystem::create_directory(folder / round);
  setenv(kFolder, folder.c_str(), 1);
  std::vector<pid_t> processes(2);
  for (int rank = 0; rank < 2; ++rank) {
    for (const char* name : {kRank, as_rank}) setenv(name, std::to_string(rank).c_str(), 1);
    const char* arguments[] = {"rank", "--gtest_filter=*DISABLED_OneProcess",
                               "--gtest_also_run_disabled_tests", nullptr};
    EXPECT_EQ(posix_spawn(&processes[rank], "/proc/self/exe", nullptr, nullptr,
                          const_cast<char**>(arguments), environ),
              0);
  }
  std::vector<int> statuses(2, -1);
  unsetenv(as_rank);
  for (int rank = 0; rank < 2; ++rank) waitpid(processes[rank], &statuses[rank], 0);
  return statuses;
}

/// What the rank that is not lost has written to a file: why its communicator has ended.
inline std::string error_in(const std::filesystem::path& folder) {
  std::ifstream file(folder / "error");
  return {std::istreambuf_iterator<char>(file), {}};
}

/// One must be killed; the other must end well and have written why.
inline void expect_that_a_killed_rank_is_told(const char* as_rank = kRank, int killed = 1) {
  const TemporaryDirectory folder;
  const std::vector<int> statuses = run_two_processes(folder.path(), as_rank);
  const int of_killed = statuses[killed], of_other = statuses[1 - killed];
  EXPECT_TRUE(WIFEXITED(of_other) && WEXITSTATUS(of_other) == 0);
  EXPECT_TRUE(WIFSIGNALED(of_killed) && WTERMSIG(of_killed) == SIGKILL);
  EXPECT_EQ(error_in(folder.path()),
            "rank " + std::to_string(killed) + " has died or lost its connection");
}

}  // namespace fusedmoe::testing
