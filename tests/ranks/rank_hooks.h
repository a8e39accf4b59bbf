// Hooks that do something else to each row, by the token it belongs to and by the rank that token
// came from. On many ranks they must do what they do on one.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "fusedmoe/experts.h"

namespace fusedmoe::testing {

/// A row's token, and the rank it came from.
struct RowOrigin {
  int rank = 0;
  std::int64_t token = 0;
};

/// Across ranks. `args` in host memory.
inline RowOrigin origin_of(const HookArgs& args, std::int64_t row) {
  std::int64_t index = args.permuted_to_slot.as<const std::int32_t>()[row] / args.topk;
  const std::int64_t token = args.origins.numbers.as<const std::int32_t>()[index];
  int rank = 0;
  for (const std::int64_t count : args.origins.counts) {
    if (index < count) break;
    index -= count;
    ++rank;
  }
  return {rank, token};
}

/// Multiplies every row by a power of two that depends on group, token and expert, as an adapter of
/// its own for each would. `find(args, row)`: the row's origin; experts[e]: global number of expert
/// e; tp_size: ranks of a group. The callbacks work in host memory, on bf16.
template <typename Find>
ExpertsHooks adapters(const Find& find, const std::vector<std::int32_t>& experts, int tp_size,
                      std::atomic<int>& rows_seen) {
  const auto scale_rows = [=, &rows_seen](const HookArgs& args) {
    const auto* offsets = args.expert_offsets.as<const std::int32_t>();
    const std::int64_t width = args.output.size(1);
    for (std::size_t e = 0; e < experts.size(); ++e) {
      for (std::int64_t row = offsets[e]; row < offsets[e + 1]; ++row, ++rows_seen) {
        const RowOrigin origin = find(args, row);
        const std::int64_t power = (origin.rank / tp_size + 2 * origin.token + experts[e]) % 3 - 1;
        auto* values = args.output.as<std::uint16_t>() + row * width;
        for (std::int64_t i = 0; i < width; ++i) {
          if ((values[i] & 0x7f80) != 0)
            values[i] = static_cast<std::uint16_t>(values[i] + (power << 7));
        }
      }
    }
  };
  return {scale_rows, scale_rows, scale_rows};
}

}  // namespace fusedmoe::testing
