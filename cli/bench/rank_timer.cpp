#include "bench/rank_timer.h"

#include <chrono>

#include "bench/bench_problem.h"
#include "bench/rank_link.h"

namespace fusedmoe::cli {

using Clock = std::chrono::steady_clock;

std::vector<double> RankTimer::largest(const std::vector<double>& mine) const {
  const ValuesByRank all = gather_values(communicator_, mine);
  std::vector<double> result;
  for (std::size_t i = 0; i < mine.size(); ++i) result.push_back(largest_of(values_of(all, i)));
  return result;
}

/// Behind a barrier threads wake up one after the other. On the CPU a message to everybody and one
/// from everybody wait for the last, without sleeping.
void RankTimer::start_together() {
  communicator_.barrier();
  if (!communicator_.device().is_cpu()) return;
  std::vector<Message> out, in;
  char nothing[2] = {};
  for (int r = 0; r < communicator_.size(); ++r) {
    if (r == communicator_.rank()) continue;
    out.push_back({r, &nothing[0], 1});
    in.push_back({r, &nothing[1], 1});
  }
  communicator_.exchange(out, in, stream_, "bench");
}

std::vector<std::vector<double>> RankTimer::samples_us(const RankPhases& phases) {
  for (int i = 0; i < 3; ++i) {
    for (const auto& phase : phases) phase();
  }
  synchronize(stream_);
  communicator_.barrier();
  std::vector<Graph> recorded;
  for (const auto& phase : phases) {
    if (limits_.graphs) recorded.emplace_back(stream_, phase);
  }
  const int replays = limits_.graphs ? 20 : 1;
  std::vector<std::vector<double>> times(phases.size());
  const Clock::time_point begin = Clock::now();
  while (true) {
    const double passed = std::chrono::duration<double>(Clock::now() - begin).count();
    const auto samples = static_cast<std::int64_t>(times.front().size());
    const bool enough = passed > limits_.max_seconds || samples >= 5 * limits_.min_samples;
    // Every rank goes on as long as one wants to.
    if (largest(samples >= limits_.min_samples && enough ? 0 : 1) == 0) break;
    for (std::size_t p = 0; p < phases.size(); ++p) {
      synchronize(stream_);
      start_together();
      const Clock::time_point start = Clock::now();
      for (int i = 0; i < replays; ++i) limits_.graphs ? recorded[p].launch(stream_) : phases[p]();
      synchronize(stream_);
      const std::chrono::duration<double, std::micro> time = Clock::now() - start;
      times[p].push_back(time.count() / replays);
    }
  }
  communicator_.check();
  return times;
}

std::vector<double> RankTimer::medians_us(const RankPhases& phases) {
  std::vector<double> medians;
  for (std::vector<double>& each : samples_us(phases)) medians.push_back(median(std::move(each)));
  return medians;
}

}  // namespace fusedmoe::cli
