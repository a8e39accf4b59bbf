// Random numbers from integer arithmetic alone, so that every machine and library draws the same.
#include "testing/random.h"

namespace fusedmoe::testing {

Random::Random(std::uint64_t seed) : state_(seed) {}

// SplitMix64: a Weyl sequence through a finalizer that mixes all bits.
std::uint64_t Random::bits() {
  state_ += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::int64_t Random::below(std::int64_t limit) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::int64_t>(static_cast<Wide>(bits()) * static_cast<std::uint64_t>(limit) >>
                                   64);
}

double Random::uniform() {
  return static_cast<double>(bits() >> 11) * 0x1p-53;
}

// The sum of twelve uniform 16-bit numbers, centred: variance 12 * (2^32 - 1) / 12 / 2^32.
double Random::normal() {
  std::int64_t sum = 0;
  for (int draw = 0; draw < 3; ++draw) {
    for (std::uint64_t rest = bits(), i = 0; i < 4; ++i, rest >>= 16) {
      sum += static_cast<std::int64_t>(rest & 0xffff);
    }
  }
  return static_cast<double>(2 * sum - 12 * 0xffff) * 0x1p-17;
}

}  // namespace fusedmoe::testing
