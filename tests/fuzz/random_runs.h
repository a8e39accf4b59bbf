// What programs of random runs share: the numbers of the command line, the seeds, and comparison.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>

#include "fusedmoe/tensor.h"

namespace fusedmoe::testing {

/// A wrong result, as opposed to a refusal.
struct Failure {
  std::string text;
};

/// Relative to an element or to a typical one, outputs being of order one.
inline void expect_close(const TensorView& actual, const TensorView& expected, double limit,
                         const std::string& what) {
  constexpr double kTypical = 0.25;
  double sum = 0;
  std::int64_t finite = 0;
  for (std::int64_t i = 0; i < expected.numel(); ++i) {
    const double e = load_f32(expected.data(), expected.dtype(), i);
    if (!std::isfinite(e)) continue;
    sum += e * e;
    ++finite;
  }
  const double rms = finite > 0 ? std::sqrt(sum / static_cast<double>(finite)) : 0;
  for (std::int64_t i = 0; i < expected.numel(); ++i) {
    const double e = load_f32(expected.data(), expected.dtype(), i);
    const double a = load_f32(actual.data(), actual.dtype(), i);
    const bool same =
        std::isfinite(e) == std::isfinite(a) &&
        (!std::isfinite(e) || std::abs(a - e) <= limit * std::max({std::abs(e), rms, kTypical}));
    if (!same) {
      throw Failure{what + ": element " + std::to_string(i) + " is " + std::to_string(a) +
                    ", not " + std::to_string(e)};
    }
  }
}

/// Reads --runs, --seconds, --seed and --verbose, and calls run(seed, what) for one seed after the
/// other; `what` becomes a description of the problem. Returns the exit status: 1 after a failure,
/// whose seed and problem are printed.
inline int run_seeds(int argc, char** argv,
                     const std::function<void(std::uint64_t seed, std::string& what)>& run,
                     const std::function<std::string()>& summary) {
  std::uint64_t seed = 0;
  double seconds = 1e9;
  long long runs = -1;
  bool verbose = false;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "0";
    if (option == "--verbose") {
      verbose = true;
      continue;
    }
    if (option == "--runs") runs = std::stoll(value);
    if (option == "--seconds") seconds = std::stod(value);
    if (option == "--seed") seed = std::stoull(value);
    ++i;
  }
  if (runs < 0 && seconds == 1e9) runs = 1000;
  const auto start = std::chrono::steady_clock::now();
  long long done = 0;
  for (; runs < 0 || done < runs; ++done, ++seed) {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    if (passed.count() > seconds) break;
    std::string what;
    std::string failure;
    if (verbose) std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
    try {
      run(seed, what);
    } catch (const Failure& wrong) {
      failure = wrong.text;
    } catch (const std::exception& error) {
      failure = std::string("not an Error: ") + error.what();
    }
    if (!failure.empty()) {
      std::fprintf(stderr, "seed %llu: %s\n  %s\n", static_cast<unsigned long long>(seed),
                   what.c_str(), failure.c_str());
      return 1;
    }
  }
  std::printf("%lld runs: %s\n", done, summary().c_str());
  return 0;
}

}  // namespace fusedmoe::testing
