// What the program says on stderr beside its result: lines, and the progress of long jobs.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fusedmoe::cli {

enum class Level { kInfo, kWarning, kError };

/// One line on stderr, "info: wrote x"; in color on a terminal, unless NO_COLOR is set.
void log(Level level, const std::string& text);

/// From now on in front of each line of log(): this process is one of several ranks. Only rank 0
/// shows its progress.
void put_rank_in_front(int rank);

/// Progress of one job on stderr: silent for the first second, then a bar on a terminal, or else a
/// line every five seconds. Erases its bar at the end.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(std::int64_t done, std::int64_t total);

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  Clock::time_point start_, last_;
  bool terminal_;
  bool drawn_ = false;
};

}  // namespace fusedmoe::cli
