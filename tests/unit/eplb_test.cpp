// balance() gives the maps of DeepSeek's own program, whose digests tests/interop/eplb_maps.py has
// written to tests/data/eplb-maps.txt: for random loads, which are drawn here as they are there.
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "fusedmoe/balance.h"

namespace fusedmoe::eplb_test {

constexpr int kTables = 100;  // in a line

std::vector<int> primes() {
  std::vector<int> result;
  for (int n = 11; n < 2048; ++n) {
    bool is_prime = true;
    for (int d = 2; d * d <= n; ++d) is_prime = is_prime && n % d != 0;
    if (is_prime) result.push_back(n);
  }
  return result;
}

class Draws {
 public:
  std::vector<double> loads(int experts) {
    std::vector<bool> free(primes_.size(), true);
    std::vector<double> result;
    for (int e = 0; e < experts; ++e) {
      std::size_t i = below(primes_.size());
      i = i * i / primes_.size();
      while (!free[i]) i = (i + 1) % primes_.size();
      free[i] = false;
      result.push_back(840.0 * primes_[i]);
    }
    return result;
  }

 private:
  std::size_t below(std::size_t limit) {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return (state_ >> 33) % limit;
  }
  const std::vector<int> primes_ = primes();
  std::uint64_t state_ = 1;
};

bool is_set(const std::string& hexadecimal, int bit) {
  const auto digit = static_cast<std::size_t>(bit / 4);
  if (digit >= hexadecimal.size()) return false;
  const std::string own = hexadecimal.substr(hexadecimal.size() - 1 - digit, 1);
  return std::stoi(own, nullptr, 16) >> bit % 4 & 1;
}

TEST(EplbTest, GivesTheMapsOfDeepSeeksProgram) {
  std::ifstream file(FUSEDMOE_TEST_DATA "/eplb-maps.txt");
  Draws draws;
  int compared = 0;
  std::int64_t experts = 0;
  BalanceOptions options;
  std::string expected, left_out;
  while (file >> experts >> options.redundant >> options.num_ranks >> options.num_hosts >>
         options.num_groups >> expected >> left_out) {
    std::vector<double> loads;
    for (int table = 0; table < kTables; ++table) {
      const auto each = draws.loads(static_cast<int>(experts));
      loads.insert(loads.end(), each.begin(), each.end());
    }
    const auto layers = balance(loads, experts, options);
    std::uint64_t digest = 0xcbf29ce484222325;
    for (int table = 0; table < kTables; ++table) {
      if (is_set(left_out, table)) continue;
      ++compared;
      for (const std::int32_t expert : layers[table].placement.physical_to_logical()) {
        digest = (digest ^ static_cast<std::uint64_t>(expert)) * 0x100000001b3;
      }
    }
    EXPECT_EQ(digest, std::stoull(expected, nullptr, 16))
        << experts << " experts on " << options.num_ranks << " ranks, table " << compared;
  }
  EXPECT_GE(compared, 10000);
}

}  // namespace fusedmoe::eplb_test
