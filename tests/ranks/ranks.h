// Ranks as threads, for the tests of everything that runs on several.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fusedmoe/comm.h"

namespace fusedmoe::testing {

/// Long enough for a loaded machine, where nothing goes wrong.
inline constexpr std::chrono::milliseconds kPatient{60000};
/// Where a rank is expected to miss.
inline constexpr std::chrono::milliseconds kImpatient{150};

/// Calls function(rank) on so many threads; element r is what rank r has thrown, "" for nothing.
inline std::vector<std::string> errors_of_ranks(int size,
                                                const std::function<void(int rank)>& function) {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        function(rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// The same, where no rank may throw.
inline void run_ranks(int size, const std::function<void(int rank)>& function) {
  const std::vector<std::string> errors = errors_of_ranks(size, function);
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)], "") << "rank " << rank;
  }
}

}  // namespace fusedmoe::testing
