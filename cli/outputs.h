// What commands that write files have in common.
#pragma once

#include <string>
#include <vector>

#include "command_line.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::cli {

/// Declares --force of such a command.
void add_force_option(Command& command, bool& force);

/// To be called before there are threads. From then on SIGINT, SIGTERM and SIGHUP remove what is
/// unfinished before they end the process. What killed runs have left where the outputs will be is
/// removed, and named; what may belong to a run on another host is removed only with `force`.
void begin_outputs(const std::vector<std::string>& outputs, bool force);

/// A file that a command reads, and what an Error calls it; an empty path is none.
struct FileRead {
  std::string path;
  std::string what;
};
std::vector<FileRead> files_of(const Checkpoint& checkpoint);

/// Throws Error where the output, of that option, would take the place of a file that is read.
void check_output(const char* option, const std::string& output, const std::vector<FileRead>& read);

/// Writes what is still buffered for stdout; throws Error where that fails, as on a full disk.
void flush_stdout();

}  // namespace fusedmoe::cli
