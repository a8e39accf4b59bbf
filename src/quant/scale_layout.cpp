#include "fusedmoe/quant.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/check.h"

namespace fusedmoe {
namespace {

constexpr std::int64_t kTileRows = 128, kTileColumns = 4, kTileBytes = 512;
constexpr std::int64_t kColumnAlignment = 4;  // elements of 4 bytes, for TMA's 16

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) {
  return ceil_div(a, b) * b;
}

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

void check_columns(const TensorView& flat, const TensorView& columns, DType dtype,
                   std::int64_t groups_per_word) {
  core::check_tensor(
      columns, "columns", dtype,
      {ceil_div(flat.size(1), groups_per_word), round_up(flat.size(0), kColumnAlignment)});
}

void check_e8m0(const TensorView& flat, const TensorView& columns) {
  check_bytes(flat, "flat");
  FUSEDMOE_CHECK_FAULT(flat.rank() == 2, kShape, "flat", core::describe(flat), "of rank 2");
  check_columns(flat, columns, DType::kI32, 4);
}

/// Bits by which the code of `column` is shifted in its word.
int shift_of(std::int64_t column, int width, CodeOrder order) {
  constexpr std::array<int, 8> kAwqPlaces{0, 4, 1, 5, 2, 6, 3, 7};  // of columns 0 to 7
  const int per_word = 32 / width;
  const auto place = static_cast<int>(column % per_word);
  return width * (order == CodeOrder::kAwq ? kAwqPlaces[static_cast<std::size_t>(place)] : place);
}

void check_codes(const TensorView& codes, const TensorView& words, int width, CodeOrder order) {
  FUSEDMOE_CHECK(width == 4 || width == 8, "width", core::to_string(width), "4 or 8");
  FUSEDMOE_CHECK(width == 4 || order == CodeOrder::kSequential, "order", "awq",
                 "sequential for 8 bits");
  check_matrix(codes, "codes", DType::kU8);
  check_matrix(words, "words", DType::kI32);
  check_shape(words, "words", {codes.size(0), ceil_div(codes.size(1), 32 / width)});
}

void check_words(const TensorView& words) {
  FUSEDMOE_CHECK_FAULT(words.defined() && words.dtype() == DType::kI32 && words.contiguous() &&
                           words.device().is_cpu(),
                       kDType, "words", core::describe(words), "contiguous i32");
}

void check_w4a8(const TensorView& scales, const TensorView& packed) {
  check_matrix(scales, "scales", DType::kE4M3);
  core::check_tensor(packed, "packed", DType::kE4M3, {scales.size(1), scales.size(0), 8});
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

void tiled_row_offsets(std::span<const std::int32_t> rows, std::span<std::int64_t> offsets) {
  FUSEDMOE_CHECK_FAULT(offsets.size() == rows.size() + 1, kShape, "offsets",
                       core::format("{} elements", offsets.size()),
                       core::format("{}", rows.size() + 1));
  std::int64_t offset = 0;
  for (std::size_t e = 0; e < rows.size(); ++e) {
    offsets[e] = offset;
    offset += round_up(rows[e], kTileRows);
  }
  offsets.back() = offset;
}

void scales_to_columns(const TensorView& flat, const TensorView& columns) {
  check_matrix(flat, "flat", DType::kF32);
  check_columns(flat, columns, DType::kF32, 1);
  std::memset(columns.data(), 0, static_cast<std::size_t>(columns.nbytes()));
  for (std::int64_t r = 0; r < flat.size(0); ++r) {
    for (std::int64_t g = 0; g < flat.size(1); ++g) {
      columns.as<float>()[position(columns, g, r)] = flat.as<float>()[position(flat, r, g)];
    }
  }
}

void columns_to_scales(const TensorView& columns, const TensorView& flat) {
  check_matrix(flat, "flat", DType::kF32);
  check_columns(flat, columns, DType::kF32, 1);
  for (std::int64_t r = 0; r < flat.size(0); ++r) {
    for (std::int64_t g = 0; g < flat.size(1); ++g) {
      flat.as<float>()[position(flat, r, g)] = columns.as<float>()[position(columns, g, r)];
    }
  }
}

void pack_e8m0_columns(const TensorView& flat, const TensorView& columns) {
  check_e8m0(flat, columns);
  std::memset(columns.data(), 0, static_cast<std::size_t>(columns.nbytes()));
  for (std::int64_t r = 0; r < flat.size(0); ++r) {
    for (std::int64_t g = 0; g < flat.size(1); ++g) {
      columns.as<std::uint32_t>()[position(columns, g / 4, r)] |=
          static_cast<std::uint32_t>(flat.as<std::uint8_t>()[position(flat, r, g)]) << (g % 4 * 8);
    }
  }
}

void unpack_e8m0_columns(const TensorView& columns, const TensorView& flat) {
  check_e8m0(flat, columns);
  for (std::int64_t r = 0; r < flat.size(0); ++r) {
    for (std::int64_t g = 0; g < flat.size(1); ++g) {
      flat.as<std::uint8_t>()[position(flat, r, g)] = static_cast<std::uint8_t>(
          columns.as<std::uint32_t>()[position(columns, g / 4, r)] >> (g % 4 * 8));
    }
  }
}

void pack_codes(const TensorView& codes, const TensorView& words, int width, CodeOrder order) {
  check_codes(codes, words, width, order);
  const std::int64_t columns = codes.size(1), per_word = 32 / width;
  const std::uint32_t mask = (1U << width) - 1;
  for (std::int64_t r = 0; r < words.size(0); ++r) {
    for (std::int64_t w = 0; w < words.size(1); ++w) {
      std::uint32_t word = 0;
      for (std::int64_t c = w * per_word; c < std::min(columns, (w + 1) * per_word); ++c) {
        word |= (codes.as<std::uint8_t>()[position(codes, r, c)] & mask)
                << shift_of(c, width, order);
      }
      words.as<std::uint32_t>()[position(words, r, w)] = word;
    }
  }
}

void unpack_codes(const TensorView& words, const TensorView& codes, int width, CodeOrder order) {
  check_codes(codes, words, width, order);
  const std::int64_t per_word = 32 / width;
  const std::uint32_t mask = (1U << width) - 1;
  for (std::int64_t r = 0; r < codes.size(0); ++r) {
    for (std::int64_t c = 0; c < codes.size(1); ++c) {
      codes.as<std::uint8_t>()[position(codes, r, c)] = static_cast<std::uint8_t>(
          words.as<std::uint32_t>()[position(words, r, c / per_word)] >> shift_of(c, width, order) &
          mask);
    }
  }
}

void flip_int4_sign(const TensorView& words) {
  check_words(words);
  for (std::int64_t i = 0; i < words.numel(); ++i) words.as<std::uint32_t>()[i] ^= 0x88888888U;
}

void unify_int4(const TensorView& words) {
  check_words(words);
  for (std::int64_t i = 0; i < words.numel(); ++i) {
    std::uint32_t& word = words.as<std::uint32_t>()[i];
    for (int shift = 0; shift < 32; shift += 4) {
      const std::uint32_t v = word >> shift & 15;
      if (v >= 1 && v <= 7) word ^= (v ^ (8 - v)) << shift;
    }
  }
}

void pack_w4a8_scales(const TensorView& scales, const TensorView& packed) {
  check_w4a8(scales, packed);
  auto* table = packed.as<std::uint8_t>();
  for (std::int64_t g = 0; g < scales.size(1); ++g) {
    for (std::int64_t r = 0; r < scales.size(0); ++r) {
      const float scale = e4m3_to_f32(scales.as<std::uint8_t>()[position(scales, r, g)]);
      for (int factor = -8; factor <= -1; ++factor) {
        *table++ = f32_to_e4m3(scale * static_cast<float>(factor));
      }
    }
  }
}

void unpack_w4a8_scales(const TensorView& packed, const TensorView& scales) {
  check_w4a8(scales, packed);
  constexpr std::uint8_t kSign = 0x80;
  for (std::int64_t g = 0; g < scales.size(1); ++g) {
    for (std::int64_t r = 0; r < scales.size(0); ++r) {
      scales.as<std::uint8_t>()[position(scales, r, g)] =
          packed.as<std::uint8_t>()[(g * scales.size(0) + r) * 8 + 7] ^ kSign;
    }
  }
}

}  // namespace fusedmoe
