// Copies of rows on the host.
#pragma once

#include <cstdint>
#include <cstring>

#include "fusedmoe/tensor.h"

namespace fusedmoe::core {

/// Copies `count` rows that follow each other on both sides; without gaps between them in one long
/// copy, which is the fastest. Elements of a row lie side by side, rows of `to` too.
inline void copy_rows(const TensorView& from, std::int64_t from_row, const TensorView& to,
                      std::int64_t to_row, std::int64_t count) {
  const std::int64_t row_bytes = bytes(from.dtype(), from.size(1));
  const std::int64_t stride_bytes = bytes(from.dtype(), from.stride(0));
  const auto* source = from.as<const std::byte>() + from_row * stride_bytes;
  auto* target = to.as<std::byte>() + to_row * row_bytes;
  const bool together = stride_bytes == row_bytes;
  const auto size = static_cast<std::size_t>(together ? count * row_bytes : row_bytes);
  for (std::int64_t row = 0; row < (together ? 1 : count); ++row) {
    std::memcpy(target + row * row_bytes, source + row * stride_bytes, size);
  }
}

/// Copies the bits of a matrix, whatever its strides, to a contiguous one of as many elements of as
/// many bytes.
inline void copy_matrix(const TensorView& from, const TensorView& to) {
  if (from.stride(1) == 1) return copy_rows(from, 0, to, 0, from.size(0));
  const std::int64_t width = bytes(from.dtype(), 1);
  auto* target = to.as<std::byte>();
  for (std::int64_t row = 0; row < from.size(0); ++row) {
    const auto* source = from.as<const std::byte>() + row * from.stride(0) * width;
    for (std::int64_t col = 0; col < from.size(1); ++col, target += width) {
      std::memcpy(target, source + col * from.stride(1) * width, static_cast<std::size_t>(width));
    }
  }
}

/// How many of the rows from `begin` on are also neighbors where they lie.
template <typename TokenOf>
std::int64_t run_of(const TokenOf& token_of, std::int64_t begin, std::int64_t end) {
  std::int64_t run = 1;
  while (begin + run < end && token_of(begin + run) == token_of(begin) + run) ++run;
  return run;
}

}  // namespace fusedmoe::core
