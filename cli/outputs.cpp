#include "outputs.h"

#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <system_error>
#include <thread>

#include "files/output.h"
#include "support.h"

namespace fusedmoe::cli {
namespace {

/// A thread of its own waits for the signals, because a handler may not remove files.
void clean_up_on_signals() {
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond `ulimit -f` is an Error, as a full disk is
  sigset_t signals;
  sigemptyset(&signals);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action {};
    sigaction(number, nullptr, &action);
    if (action.sa_handler != SIG_IGN) sigaddset(&signals, number);  // by nohup, for one
  }
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread([signals] {
    int number = 0;
    sigwait(&signals, &number);
    files::abandon_outputs();
    std::signal(number, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    raise(number);
    _exit(128 + number);  // the first process of a container ignores its own signals
  }).detach();
}

void clear_leftovers(const std::string& output, bool force) {
  using Owner = files::Leftover::Owner;
  for (const auto& [path, owner] : files::find_leftovers(output)) {
    const bool remove = owner == Owner::kGone || (owner == Owner::kUnknown && force);
    if (remove && files::remove_leftover(path)) {
      log(Level::kInfo,
          fmt::format("removed {}, which a run that was killed has left", path.string()));
    } else if (owner == Owner::kUnknown) {
      log(Level::kWarning,
          fmt::format("{} was left by a run that was killed, unless it runs on another host; "
                      "--force removes it",
                      path.string()));
    } else {
      log(Level::kWarning, fmt::format("another run is writing {}", path.string()));
    }
  }
}

}  // namespace

void add_force_option(Command& command, bool& force) {
  command.add_flag("--force", force,
                   "Also remove unfinished outputs that runs on other hosts have left; make sure "
                   "that none of them still runs");
}

void begin_outputs(const std::vector<std::string>& outputs, bool force) {
  clean_up_on_signals();
  for (const std::string& output : outputs) {
    if (!output.empty()) clear_leftovers(output, force);
  }
}

std::vector<FileRead> files_of(const Checkpoint& checkpoint) {
  std::vector<FileRead> read;
  for (const std::string& file : checkpoint.files()) {
    read.push_back({file, "a file of the checkpoint"});
  }
  return read;
}

void check_output(const char* option, const std::string& output,
                  const std::vector<FileRead>& read) {
  std::error_code unknown;  // where one of them is not there
  for (const auto& [path, what] : read) {
    if (path.empty() || !std::filesystem::equivalent(output, path, unknown)) continue;
    throw Error::invalid(option, fmt::format("{} {} is {}: name another", option, output, what));
  }
}

void flush_stdout() {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout) return;
  throw Error::io("stdout", "cannot write all of the results to stdout");
}

}  // namespace fusedmoe::cli
