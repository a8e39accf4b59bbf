#include "fusedmoe/quant.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/ceil_div.h"
#include "core/check.h"

namespace fusedmoe {
namespace {

constexpr std::int64_t kTileRows = 128, kTileColumns = 4, kTileBytes = 512;

using core::ceil_div;
using core::round_up;

void check_bytes(const TensorView& view, const char* argument) {
  FUSEDMOE_CHECK_FAULT(view.defined() && bits(view.dtype()) == 8 && view.device().is_cpu(), kDType,
                       argument, core::describe(view), "one-byte elements in host memory");
}

void check_matrix(const TensorView& view, const char* argument, DType dtype) {
  FUSEDMOE_CHECK_FAULT(
      view.defined() && view.rank() == 2 && view.dtype() == dtype && view.device().is_cpu(), kShape,
      argument, core::describe(view), core::format("{} of rank 2", name(dtype)));
}

void check_shape(const TensorView& view, const char* argument, const Shape& shape) {
  FUSEDMOE_CHECK_FAULT(view.shape() == shape, kShape, argument, core::describe(view),
                       "of shape " + to_string(shape));
}

std::int64_t position(const TensorView& view, std::int64_t row, std::int64_t column) {
  return row * view.stride(0) + column * view.stride(1);
}

void check_tiles(const TensorView& flat, const TensorView& tiled) {
  check_bytes(flat, "flat");
  FUSEDMOE_CHECK_FAULT(flat.rank() == 2 || flat.rank() == 3, kShape, "flat", core::describe(flat),
                       "(rows, columns) or (E, rows, columns)");
  core::check_tensor(tiled, "tiled", flat.dtype(), tiled_scales_shape(flat.shape()));
}

/// Calls function(flat element, tiled element) for each scale.
template <typename Function>
void for_each_tiled(const TensorView& flat, const TensorView& tiled, const Function& function) {
  const bool stack = flat.rank() == 3;
  const std::int64_t experts = stack ? flat.size(0) : 1;
  for (std::int64_t e = 0; e < experts; ++e) {
    const TensorView matrix = stack ? flat.select(0, e) : flat;
    const std::int64_t rows = matrix.size(0), columns = matrix.size(1);
    auto* tiles = tiled.as<std::uint8_t>() + e * tiled_scales_bytes(rows, columns);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        function(matrix.as<std::uint8_t>()[position(matrix, r, c)],
                 tiles[tiled_scale_offset(r, c, columns)]);
      }
    }
  }
}

/// Bits by which each code of a word is shifted.
std::array<int, 8> shifts_of(int width, CodeOrder order) {
  if (order == CodeOrder::kAwq) return {0, 16, 4, 20, 8, 24, 12, 28};
  std::array<int, 8> shifts{};
  for (int i = 0; i < 32 / width; ++i) shifts[static_cast<std::size_t>(i)] = width * i;
  return shifts;
}

void check_codes(const TensorView& codes, const TensorView& words, int width, CodeOrder order) {
  FUSEDMOE_CHECK(width == 4 || width == 8, "width", core::to_string(width), "4 or 8");
  FUSEDMOE_CHECK(width == 4 || order == CodeOrder::kSequential, "order", "awq",
                 "sequential for 8 bits");
  check_matrix(codes, "codes", DType::kU8);
  check_matrix(words, "words", DType::kI32);
  check_shape(words, "words", {codes.size(0), ceil_div(codes.size(1), 32 / width)});
}

/// Calls function(code, word, count) for each word; code(i) is the i-th of its `count` codes.
template <typename Function>
void for_each_word(const TensorView& codes, const TensorView& words, int width,
                   const Function& function) {
  const std::int64_t columns = codes.size(1), per_word = 32 / width, step = codes.stride(1);
  for (std::int64_t r = 0; r < words.size(0); ++r) {
    for (std::int64_t w = 0; w < words.size(1); ++w) {
      const std::int64_t begin = w * per_word, count = std::min(per_word, columns - begin);
      std::uint8_t* first = codes.as<std::uint8_t>() + position(codes, r, begin);
      const auto code = [&](std::size_t i) -> std::uint8_t& {
        return first[static_cast<std::int64_t>(i) * step];
      };
      function(code, words.as<std::uint32_t>()[position(words, r, w)],
               static_cast<std::size_t>(count));
    }
  }
}

}  // namespace

std::int64_t tiled_scales_bytes(std::int64_t rows, std::int64_t columns) {
  return round_up(rows, kTileRows) * round_up(columns, kTileColumns);
}

std::int64_t tiled_scale_offset(std::int64_t row, std::int64_t column, std::int64_t columns) {
  const std::int64_t tile =
      row / kTileRows * ceil_div(columns, kTileColumns) + column / kTileColumns;
  return tile * kTileBytes + row % 32 * 16 + row / 32 % 4 * 4 + column % kTileColumns;
}

Shape tiled_scales_shape(const Shape& flat) {
  FUSEDMOE_CHECK_FAULT(flat.rank() == 2 || flat.rank() == 3, kShape, "flat", to_string(flat),
                       "(rows, columns) or (E, rows, columns)");
  const int first = flat.rank() - 2;
  const std::int64_t m = ceil_div(flat[first], kTileRows);
  const std::int64_t k = ceil_div(flat[first + 1], kTileColumns);
  if (first == 0) return {m, k, 32, 4, 4};
  return {flat[0], m, k, 32, 4, 4};
}

void tile_scales(const TensorView& flat, const TensorView& tiled) {
  check_tiles(flat, tiled);
  std::memset(tiled.data(), 0, static_cast<std::size_t>(tiled.nbytes()));
  for_each_tiled(flat, tiled, [](std::uint8_t from, std::uint8_t& to) { to = from; });
}

void untile_scales(const TensorView& tiled, const TensorView& flat) {
  check_tiles(flat, tiled);
  for_each_tiled(flat, tiled, [](std::uint8_t& to, std::uint8_t from) { to = from; });
}

void pack_codes(const TensorView& codes, const TensorView& words, int width, CodeOrder order) {
  check_codes(codes, words, width, order);
  const std::array<int, 8> shifts = shifts_of(width, order);
  const std::uint32_t mask = (1U << width) - 1;
  for_each_word(codes, words, width, [&](const auto& code, std::uint32_t& word, std::size_t count) {
    word = 0;
    for (std::size_t i = 0; i < count; ++i) word |= (code(i) & mask) << shifts[i];
  });
}

void unpack_codes(const TensorView& words, const TensorView& codes, int width, CodeOrder order) {
  check_codes(codes, words, width, order);
  const std::array<int, 8> shifts = shifts_of(width, order);
  const std::uint32_t mask = (1U << width) - 1;
  for_each_word(codes, words, width, [&](const auto& code, std::uint32_t word, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      code(i) = static_cast<std::uint8_t>(word >> shifts[i] & mask);
    }
  });
}

}  // namespace fusedmoe
