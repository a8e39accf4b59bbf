// Rows that come from several places, and rows that go to several: those of other ranks lie in peer
// memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fusedmoe {

/// Row i is row i % rows_each of source i / rows_each. Those of a source lie one after the other.
struct RowSources {
  static constexpr int kMost = 16;
  /// Of a row in the dtype of the layer, which codes are shorter than: several are in the shared
  /// memory of a multiprocessor at once.
  static constexpr std::int64_t kMostRowBytes = std::int64_t{64} << 10;

  const std::byte* values[kMost] = {};
  const std::byte* scales[kMost] = {};            ///< with scale_bytes
  std::int64_t value_bytes = 0, scale_bytes = 0;  ///< of a row
  std::int64_t rows_each = 0;
  std::int64_t first_row = 0;             ///< this one is row 0 of whoever reads them
  const std::uint32_t* failed = nullptr;  ///< on the device: not 0 if no rows come any more
};

/// Row i goes to row i % rows_each of target i / rows_each. The rows of a target lie one after the
/// other.
struct RowTargets {
  std::byte* rows[RowSources::kMost] = {};
  std::int64_t rows_each = 0;             ///< 0: there are no targets
  std::int64_t first_row = 0;             ///< the number of the first row that is written
  const std::uint32_t* failed = nullptr;  ///< on the device: not 0 if none may be written any more
};

}  // namespace fusedmoe
