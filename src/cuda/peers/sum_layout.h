// Where the sums of ranks that have the same tokens lie in every arena, and how many shots they
// take.
#pragma once

#include <cstdint>

#include "core/ceil_div.h"
#include "cuda/peers/protocol.h"

namespace fusedmoe::cuda {

/// Of a rank's parts in one launch. More rows are added in several pieces.
inline constexpr std::int64_t kMostSumBytes = std::int64_t{6} << 20;
inline constexpr std::int64_t kMostSumRowBytes = kMostSumBytes / 2;
/// Of a launch. Half of them, rounded up, have kMostSumBytes / 2 at most.
constexpr std::int64_t most_sum_rows(std::int64_t row_bytes) {
  return kMostSumRowBytes / row_bytes * 2;
}

inline constexpr std::int64_t kSumsBegin =
    core::round_up(static_cast<std::int64_t>(sizeof(ArenaHead)), std::int64_t{256});
/// A rank's parts, in one of two buffers by turns. `before`: as in ArenaHead.
FUSEDMOE_HD constexpr std::int64_t parts_begin(std::uint32_t before) {
  return kSumsBegin + (before % 2) * kMostSumBytes;
}
/// The totals of the tokens that this rank adds up for all. They lie in one of two buffers by
/// turns, too: others may still read those of one piece while this rank adds the next.
FUSEDMOE_HD constexpr std::int64_t totals_begin(std::uint32_t before) {
  return kSumsBegin + 2 * kMostSumBytes + (before % 2) * (kMostSumBytes / 2);
}
inline constexpr std::int64_t kSumsEnd = kSumsBegin + 3 * kMostSumBytes;

/// In one shot every rank reads the parts of all others: (ranks - 1) x bytes. In two shots it first
/// reads the others' parts of its share of the tokens, and then the others' totals. That is
/// 2 x (ranks - 1) / ranks x bytes, and one wait more.
/// In that wait the next piece of a sum comes, if there is one.
constexpr bool takes_two_shots(int ranks, std::int64_t bytes, bool has_next) {
  constexpr std::int64_t kWait = std::int64_t{3} << 19;  // what NVLink brings meanwhile: 5 us
  return has_next || bytes * (ranks - 1) * (ranks - 2) > kWait * ranks;
}

}  // namespace fusedmoe::cuda
