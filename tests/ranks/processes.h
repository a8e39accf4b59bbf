// Ranks as processes of this host, which are forked.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fusedmoe/comm.h"

namespace fusedmoe::testing {

/// What texts_of_processes() gives for a process that has ended before it returned a text.
inline constexpr const char* kDied = "!the process has died";

/// Calls function(rank, control) in so many processes, which share a control plane; element r is
/// what rank r's has returned. It must not throw.
inline std::vector<std::string> texts_of_processes(
    int size,
    const std::function<std::string(int rank, const std::shared_ptr<ControlPlane>&)>& function) {
  std::string folder = (std::filesystem::temp_directory_path() / "ranks-XXXXXX").string();
  if (!mkdtemp(folder.data())) throw std::runtime_error("cannot make a folder in " + folder);
  struct Process {
    pid_t number;
    int texts;  // the end of its pipe
  };
  std::vector<Process> processes;
  for (int rank = 0; rank < size; ++rank) {
    std::array<int, 2> ends{};
    if (pipe(ends.data()) != 0) throw std::runtime_error("cannot make a pipe");
    const pid_t process = fork();
    if (process < 0) throw std::runtime_error("cannot fork");
    if (process == 0) {
      const std::string text = "=" + function(rank, make_file_control_plane(folder));
      const bool written = write(ends[1], text.data(), text.size()) > 0;
      _exit(written ? 0 : 1);
    }
    close(ends[1]);
    processes.push_back({process, ends[0]});
  }
  std::vector<std::string> results;
  for (const Process& process : processes) {
    std::string text;
    std::array<char, 1000> part{};
    for (ssize_t bytes = 0; (bytes = read(process.texts, part.data(), part.size())) > 0;) {
      text.append(part.data(), static_cast<std::size_t>(bytes));
    }
    close(process.texts);
    int status = 0;
    waitpid(process.number, &status, 0);
    results.push_back(text.starts_with('=') && status == 0 ? text.substr(1) : kDied);
  }
  std::filesystem::remove_all(folder);
  return results;
}

/// How many files of memory that ranks share this process has mapped.
inline int mapped_files() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:fusedmoe") != std::string::npos;
  }
  return count;
}

}  // namespace fusedmoe::testing
