#include "cpu/tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "core/check.h"
#include "fusedmoe/quant.h"
#include "quant/weight_layout.h"

namespace fusedmoe::cpu {
namespace {

// ---- f32, bf16, f16 -----------------------------------------------------------------------------

/// Calls visit(element of the matrix, element of the tile): elements of type T in steps of kPair
/// per column, k fastest inside a step.
template <typename T, int kPair, typename Tile, typename Visit>
void visit_plain(const Columns& columns, std::int64_t k, Tile* tile, Visit visit) {
  for (int c = 0; c < kTileColumns; ++c) {
    if (!columns[c].matrix) continue;
    const TensorView& values = columns[c].matrix->values;
    T* row = values.as<T>() + columns[c].row * values.stride(0);
    const std::int64_t stride = values.stride(1);
    for (std::int64_t i = 0; i < k; ++i) {
      visit(row[i * stride], tile[(i / kPair * kTileColumns + c) * kPair + i % kPair]);
    }
  }
}

// ---- MXFP4 --------------------------------------------------------------------------------------

/// Moves the even nibbles of 8 codes to the low 16 bits, the odd ones to the high 16 bits.
std::uint32_t split_parity(std::uint32_t codes) {
  const auto compress = [](std::uint32_t x) {
    x = (x | (x >> 4)) & 0x00FF00FFu;
    return (x | (x >> 8)) & 0xFFFFu;
  };
  return compress(codes & 0x0F0F0F0Fu) | compress((codes >> 4) & 0x0F0F0F0Fu) << 16;
}

/// The inverse.
std::uint32_t join_parity(std::uint32_t word) {
  const auto spread = [](std::uint32_t x) {
    x = (x | (x << 8)) & 0x00FF00FFu;
    return (x | (x << 4)) & 0x0F0F0F0Fu;
  };
  return spread(word & 0xFFFFu) | spread(word >> 16) << 4;
}

// The kernels add scales to bf16 exponents (Mxfp4ToBf16) and keep accumulators in units of a scale
// (stream.h), so scales must leave room in the exponent: from 2^-62 to 2^62, and within 2^48 of
// each other in a row. Then an accumulator is finite and normal wherever the plain value is between
// 2^-78 and 2^79. The weights of real models are far inside these limits.
constexpr int kMinScaleCode = 127 - 62;
constexpr int kMaxScaleCode = 127 + 62;
constexpr int kMaxScaleSpread = 48;

/// Checks the scale codes of one tile column. Blocks of zeros, whose scales do not matter, are left
/// out and take a neighbour's.
class ColumnScales {
 public:
  /// Takes the stored code of a block with a non-zero value.
  int use(int stored, std::int64_t row, std::int64_t block) {
    FUSEDMOE_CHECK_SUPPORTED(stored >= kMinScaleCode && stored <= kMaxScaleCode, kQuantScheme,
                             "scales",
                             core::format("E8M0 code {} (row {}, block {})", stored, row, block),
                             core::format("in [{}, {}] for a block with non-zero values; experts "
                                          "'reference' take any",
                                          kMinScaleCode, kMaxScaleCode));
    if (first_ < 0) first_ = low_ = high_ = stored;
    low_ = std::min(low_, stored);
    high_ = std::max(high_, stored);
    FUSEDMOE_CHECK_SUPPORTED(
        high_ - low_ <= kMaxScaleSpread, kQuantScheme, "scales",
        core::format("E8M0 codes {} to {} in row {}", low_, high_, row),
        core::format("within {} of each other; experts 'reference' take any", kMaxScaleSpread));
    return stored;
  }
  int first() const { return first_ < 0 ? 127 : first_; }

 private:
  int first_ = -1, low_ = 0, high_ = 0;
};

/// Codes [32 block, 32 block + 32) of a row of `k`, zero behind its end.
std::array<std::uint32_t, 4> mxfp4_block(const Column& column, std::int64_t block, std::int64_t k) {
  std::array<std::uint32_t, 4> words{};
  const TensorView& values = column.matrix->values;
  const std::int64_t left = std::min<std::int64_t>(k - block * kGroup, kGroup);
  std::memcpy(words.data(),
              values.as<const std::byte>() + column.row * values.stride(0) + block * kGroup / 2,
              static_cast<std::size_t>((left + 1) / 2));
  if (left % 2 != 0) words[static_cast<std::size_t>(left / 8)] &= ~(~0u << (4 * (left % 8)));
  return words;
}

void pack_mxfp4_column(const TileShape& shape, const Column& column, int c, std::byte* tile) {
  ColumnScales codes;
  int previous = -1;
  std::byte* group = tile + kMxfp4HeaderBytes;
  for (std::int64_t g = 0; g < shape.padded_k / kGroup; ++g, group += kMxfp4GroupBytes) {
    std::array<std::uint32_t, 4> words{};
    int relative = 0;
    if (column.matrix && g * kGroup < shape.k) {
      words = mxfp4_block(column, g, shape.k);
      const bool zero = ((words[0] | words[1] | words[2] | words[3]) & 0x77777777u) == 0;
      if (!zero) {
        const TensorView& scales = column.matrix->scales;
        const std::int64_t index =
            core::scale_index(shape.key, *column.matrix, scales, column.row, g * kGroup);
        const int code = codes.use(scales.as<const std::uint8_t>()[index], column.row, g);
        relative = previous < 0 ? 0 : previous - code;
        previous = code;
      }
    }
    group[c] = static_cast<std::byte>(127 + relative);
    for (int q = 0; q < 4; ++q) {
      const std::uint32_t split = split_parity(words[q]);
      std::memcpy(group + kTileColumns + (q * kTileColumns + c) * 4, &split, 4);
    }
  }
  tile[c] = static_cast<std::byte>(codes.first());
  tile[kTileColumns + c] = static_cast<std::byte>(previous < 0 ? codes.first() : previous);
}

void unpack_mxfp4_column(const TileShape& shape, const Column& column, int c,
                         const std::byte* tile) {
  const TensorView &values = column.matrix->values, &scales = column.matrix->scales;
  int code = static_cast<std::uint8_t>(tile[c]);
  const std::byte* group = tile + kMxfp4HeaderBytes;
  for (std::int64_t g = 0; g * kGroup < shape.k; ++g, group += kMxfp4GroupBytes) {
    code -= static_cast<std::uint8_t>(group[c]) - 127;
    const std::int64_t index =
        core::scale_index(shape.key, *column.matrix, scales, column.row, g * kGroup);
    scales.as<std::uint8_t>()[index] = static_cast<std::uint8_t>(code);
    std::array<std::uint32_t, 4> words{};
    for (int q = 0; q < 4; ++q) {
      std::memcpy(&words[q], group + kTileColumns + (q * kTileColumns + c) * 4, 4);
      words[q] = join_parity(words[q]);
    }
    const std::int64_t left = std::min<std::int64_t>(shape.k - g * kGroup, kGroup);
    std::memcpy(values.as<std::byte>() + column.row * values.stride(0) + g * kGroup / 2,
                words.data(), static_cast<std::size_t>((left + 1) / 2));
  }
}

// ---- Codes in blocks ----------------------------------------------------------------------------

/// Where the code of element k and column c lies within its group: the byte, and for 4-bit codes
/// the shift in it.
struct CodePosition {
  std::int64_t byte;
  int shift;
};

CodePosition code_position(Codes codes, std::int64_t k, int c) {
  switch (block_codes(codes).elements) {
    case Codes::kE4M3:
      return {k / 4 * kStepBytes + c / 4 * 16 + k % 4 / 2 * 8 + c % 4 * 2 + k % 2, 0};
    case Codes::kInt8:
      return {k / 4 * kStepBytes + c * 4 + k % 4, 0};
    default: {
      const auto bit = static_cast<int>(16 * (k % 2) + 4 * (k % 8 / 2));
      return {k / 8 * kStepBytes + c * 4 + bit / 8, bit % 8};
    }
  }
}

/// The code that stands for zero, or with kIq4 for the 1 that is nearest to it, for padding.
std::uint8_t zero_code(const TileFormat& format) {
  const BlockCodes blocks = block_codes(format.codes);
  if (blocks.offsets) return 0;
  switch (blocks.elements) {
    case Codes::kInt4:
    case Codes::kW4A8:
    case Codes::kIq4:
      return 8;
    case Codes::kInt8:
      return 128;
    default:
      return 0;
  }
}

/// Reads and writes the codes of one matrix row, as unsigned numbers.
class RowCodes {
 public:
  RowCodes(const QuantKey& key, const Column& column)
      : values_(column.matrix->values),
        value_(key.value),
        row_(values_.as<std::byte>() + column.row * values_.stride(0) * bytes(values_.dtype(), 1)) {
  }

  std::uint8_t get(std::int64_t k) const {
    switch (value_) {
      case DType::kE2M1:
        return static_cast<std::uint8_t>(row_[k / 2]) >> (4 * (k % 2)) & 15;
      case DType::kI4:
      case DType::kIq4:
        return word(k / 8) >> (4 * (k % 8)) & 15;
      case DType::kU8:
        return word(k / 4) >> (8 * (k % 4)) & 255;
      case DType::kI8:
        return static_cast<std::uint8_t>(row_[k * values_.stride(1)]) ^ 0x80;
      default:
        return static_cast<std::uint8_t>(row_[k * values_.stride(1)]);
    }
  }

  /// Into zeroed memory.
  void add(std::int64_t k, std::uint8_t code) const {
    switch (value_) {
      case DType::kE2M1:
        row_[k / 2] |= static_cast<std::byte>(code << (4 * (k % 2)));
        return;
      case DType::kI4:
      case DType::kIq4:
        return add_word(k / 8, static_cast<std::uint32_t>(code) << (4 * (k % 8)));
      case DType::kU8:
        return add_word(k / 4, static_cast<std::uint32_t>(code) << (8 * (k % 4)));
      case DType::kI8:
        row_[k * values_.stride(1)] = static_cast<std::byte>(code ^ 0x80);
        return;
      default:
        row_[k * values_.stride(1)] = static_cast<std::byte>(code);
    }
  }

 private:
  std::byte* word_at(std::int64_t index) const { return row_ + index * values_.stride(1) * 4; }
  std::uint32_t word(std::int64_t index) const {
    std::uint32_t value;
    std::memcpy(&value, word_at(index), 4);
    return value;
  }
  void add_word(std::int64_t index, std::uint32_t bits) const {
    bits |= word(index);
    std::memcpy(word_at(index), &bits, 4);
  }

  const TensorView& values_;
  DType value_;
  std::byte* row_;
};

std::int64_t width_of(ScaleType type) {
  return type == ScaleType::kF32 ? 4 : type == ScaleType::kF16 || type == ScaleType::kBF16 ? 2 : 1;
}

/// Writes a scale; zero points and other single bytes are kNone.
void store_scale(ScaleType type, const TensorView& scales, std::int64_t index, std::byte* target) {
  const auto* source = scales.as<const std::byte>();
  if (type == ScaleType::kF32) {
    const float value = load_f32(source, scales.dtype(), index);
    std::memcpy(target, &value, 4);
    return;
  }
  if (type == ScaleType::kBF16 && scales.dtype() == DType::kE4M3) {  // a factor of W4A8
    store_f32(target, DType::kBF16, 0, load_f32(source, DType::kE4M3, index));
    return;
  }
  const std::int64_t width = width_of(type);
  std::memcpy(target, source + index * width, static_cast<std::size_t>(width));
  if (type != ScaleType::kE4M3) return;
  const auto code = static_cast<std::uint8_t>(*target);
  FUSEDMOE_CHECK_SUPPORTED(code <= 0x80, kQuantScheme, "scales",
                           core::format("E4M3 code {:#x}, negative", code),
                           "not negative; experts 'reference' take any");
  *target &= std::byte{0x7F};
}

/// Gives a scale back to the matrix.
void load_scale(ScaleType type, const TensorView& scales, std::int64_t index,
                const std::byte* source) {
  auto* target = scales.as<std::byte>();
  if (type == ScaleType::kBF16 && scales.dtype() == DType::kE4M3) {
    const float factor = load_f32(source, DType::kBF16, 0);
    const std::uint8_t sign = std::signbit(factor) ? 0x80 : 0;  // of a NaN too
    scales.as<std::uint8_t>()[index] = f32_to_e4m3(factor) | sign;
    return;
  }
  const std::int64_t width = width_of(type);
  std::memcpy(target + width * index, source, static_cast<std::size_t>(width));
}

/// Calls visit(type, part of the matrix, index in it, place in the header) for the scales and zero
/// points of column `c` in the group that begins at `k`.
template <typename Byte, typename Visit>
void visit_scales(const TileShape& shape, const Column& column, std::int64_t k, Byte* header, int c,
                  Visit visit) {
  const TileFormat& format = shape.format;
  const WeightMatrix& matrix = *column.matrix;
  const auto of_group = [&](const TensorView& part, ScaleType type, std::int64_t first,
                            Byte* place) {
    visit(type, part, core::scale_index(shape.key, matrix, part, column.row, first),
          place + width_of(type) * c);
  };
  if (shape.key.global_group.cols < 0) {
    if (format.scales != ScaleType::kNone) of_group(matrix.scales, format.scales, k, header);
    if (!format.zeros) return;
    return of_group(matrix.zero_points, ScaleType::kNone, k, header + format.scale_bytes());
  }
  // llama.cpp's blocks: their factors, then what each group has.
  const std::int64_t block = shape.key.global_group.cols;
  const std::int64_t factors = shape.key.symmetric ? 1 : 2;
  const TensorView& global = matrix.global_scale;
  for (std::int64_t i = 0; i < factors; ++i, header += 2 * kTileColumns) {
    const std::int64_t at = k / block * factors + i;
    visit(ScaleType::kF16, global, column.row * global.stride(0) + at * global.stride(1),
          header + 2 * c);
  }
  const std::int64_t end = std::min(k + block, shape.k);
  for (; k < end; k += shape.key.group.cols) {
    for (std::int64_t i = 0; i < factors; ++i, header += kTileColumns) {
      of_group(i == 0 ? matrix.scales : matrix.zero_points, ScaleType::kNone, k, header);
    }
  }
}

/// Calls visit(group's header, its codes, first k, end of k) for each group of a stream; a stream
/// without groups is one.
template <typename Byte, typename Visit>
void visit_groups(const TileShape& shape, Byte* tile, Visit visit) {
  const TileFormat& format = shape.format;
  const std::int64_t group = format.group > 0 ? format.group : shape.padded_k;
  const std::int64_t header = format.group > 0 ? format.header_bytes() : 0;
  for (std::int64_t k = 0; k < shape.padded_k; k += group) {
    const std::int64_t end = std::min(k + group, shape.padded_k);
    visit(tile, tile + header, k, end);
    tile += header + format.code_bytes(end - k);
  }
}

void put_code(const TileFormat& format, std::byte* codes, std::int64_t k, int c,
              std::uint8_t code) {
  const CodePosition at = code_position(format.codes, k, c);
  codes[at.byte] |= static_cast<std::byte>(code << at.shift);
}

void pack_codes(const TileShape& shape, const Columns& columns, std::byte* tile) {
  const TileFormat& format = shape.format;
  std::memset(tile, 0, static_cast<std::size_t>(format.tile_bytes(shape.padded_k)));
  const auto pack_group = [&](std::byte* header, std::byte* codes, std::int64_t k,
                              std::int64_t end) {
    for (int c = 0; c < kTileColumns; ++c) {
      const Column& column = columns[c];
      const std::int64_t used = column.matrix ? std::clamp(shape.k, k, end) : k;
      if (used > k) {
        visit_scales(shape, column, k, header, c, store_scale);
        const RowCodes row(shape.key, column);
        for (std::int64_t i = k; i < used; ++i) put_code(format, codes, i - k, c, row.get(i));
      }
      if (const std::uint8_t zero = zero_code(format)) {
        for (std::int64_t i = used; i < end; ++i) put_code(format, codes, i - k, c, zero);
      }
    }
  };
  visit_groups(shape, tile, pack_group);
}

void unpack_codes(const TileShape& shape, const Columns& columns, const std::byte* tile) {
  const TileFormat& format = shape.format;
  const std::uint8_t mask = format.block_k() == 4 ? 255 : 15;
  const auto unpack_group = [&](const std::byte* header, const std::byte* codes, std::int64_t k,
                                std::int64_t end) {
    for (int c = 0; c < kTileColumns; ++c) {
      const Column& column = columns[c];
      const std::int64_t used = column.matrix ? std::clamp(shape.k, k, end) : k;
      if (used == k) continue;
      visit_scales(shape, column, k, header, c, load_scale);
      const RowCodes row(shape.key, column);
      for (std::int64_t i = k; i < used; ++i) {
        const CodePosition at = code_position(format.codes, i - k, c);
        row.add(i, static_cast<std::uint8_t>(codes[at.byte]) >> at.shift & mask);
      }
    }
  };
  visit_groups(shape, tile, unpack_group);
}

/// For unquantized tiles (f32, bf16, f16): calls visit(a value of the element type, how many values
/// of k one step holds) and returns true. Other tiles hold codes: returns false.
template <typename Visit>
bool visit_elements(Codes codes, Visit visit) {
  switch (codes) {
    case Codes::kF32:
      visit(float{}, std::integral_constant<int, 1>{});
      return true;
    case Codes::kBF16:
      visit(std::uint16_t{}, std::integral_constant<int, 2>{});
      return true;
    case Codes::kF16:
      visit(std::uint16_t{}, std::integral_constant<int, 1>{});
      return true;
    default:
      return false;
  }
}

}  // namespace

void pack_tile(const TileShape& shape, const Columns& columns, std::byte* tile) {
  const bool padded =
      shape.k != shape.padded_k || !columns.back().matrix || !columns.front().matrix;
  const bool plain = visit_elements(shape.format.codes, [&](auto element, auto pair) {
    using T = decltype(element);
    if (padded) {
      std::memset(tile, 0, static_cast<std::size_t>(shape.format.tile_bytes(shape.padded_k)));
    }
    visit_plain<const T, pair>(columns, shape.k, reinterpret_cast<T*>(tile),
                               [](const T& value, T& packed) { packed = value; });
  });
  if (plain) return;
  if (shape.format.codes != Codes::kMxfp4) return pack_codes(shape, columns, tile);
  for (int c = 0; c < kTileColumns; ++c) pack_mxfp4_column(shape, columns[c], c, tile);
}

void unpack_tile(const TileShape& shape, const Columns& columns, const std::byte* tile) {
  const bool plain = visit_elements(shape.format.codes, [&](auto element, auto pair) {
    using T = decltype(element);
    visit_plain<T, pair>(columns, shape.k, reinterpret_cast<const T*>(tile),
                         [](T& value, const T& packed) { value = packed; });
  });
  if (plain) return;
  if (shape.format.codes != Codes::kMxfp4) return unpack_codes(shape, columns, tile);
  for (int c = 0; c < kTileColumns; ++c) {
    if (columns[c].matrix) unpack_mxfp4_column(shape, columns[c], c, tile);
  }
}

}  // namespace fusedmoe::cpu
