// Bits are moved, no number is computed: the matrices stand for exactly what the blocks do. Source:
// the block structs and the dequantization of ggml.
#include "checkpoint/gguf_blocks.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/check.h"
#include "core/parallel.h"

namespace fusedmoe::checkpoint {
namespace {

/// Memory of one row of the result; parts that the format does not have are null.
struct RowParts {
  std::uint8_t* values;
  std::uint8_t* scales;
  std::uint8_t* zero_points;
  std::uint8_t* factors;
};

/// Two codes a byte, from 32 codes whose first 16 are the low nibbles of 16 bytes.
void join_nibbles(const std::uint8_t* low_and_high, std::uint8_t* codes) {
  for (int i = 0; i < 16; i += 2) {
    const std::uint8_t a = low_and_high[i], b = low_and_high[i + 1];
    codes[i / 2] = static_cast<std::uint8_t>((a & 15) | (b & 15) << 4);
    codes[8 + i / 2] = static_cast<std::uint8_t>(a >> 4 | (b & 0xF0));
  }
}

// f16 scale, 16 bytes.
void decode_q4_0(const std::uint8_t* block, const RowParts& out) {
  std::memcpy(out.scales, block, 2);
  join_nibbles(block + 2, out.values);
}

// E8M0 scale, 16 bytes.
void decode_mxfp4(const std::uint8_t* block, const RowParts& out) {
  *out.scales = *block;
  join_nibbles(block + 1, out.values);
}

// f16 scale, 32 signed bytes, which become unsigned ones around 128.
void decode_q8_0(const std::uint8_t* block, const RowParts& out) {
  std::memcpy(out.scales, block, 2);
  for (int i = 0; i < 32; ++i) out.values[i] = block[2 + i] ^ 0x80;
}

// Two f16 factors; 8 scales and 8 offsets of 6 bits in 12 bytes; 128 bytes: of each 32, the low
// nibbles are a group of 32 codes, the high ones the next.
void decode_q4_k(const std::uint8_t* block, const RowParts& out) {
  std::memcpy(out.factors, block, 4);
  const std::uint8_t* packed = block + 4;
  for (int i = 0; i < 4; ++i) {
    const std::uint8_t high = packed[8 + i];
    out.scales[i] = packed[i] & 63;
    out.zero_points[i] = packed[4 + i] & 63;
    out.scales[4 + i] = static_cast<std::uint8_t>((high & 15) | packed[i] >> 6 << 4);
    out.zero_points[4 + i] = static_cast<std::uint8_t>(high >> 4 | packed[4 + i] >> 6 << 4);
  }
  const std::uint8_t* codes = block + 16;
  for (int i = 0; i < 128; i += 2) {
    const std::uint8_t a = codes[i], b = codes[i + 1];
    const int target = i / 32 * 32 + i % 32 / 2;
    out.values[target] = static_cast<std::uint8_t>((a & 15) | (b & 15) << 4);
    out.values[target + 16] = static_cast<std::uint8_t>(a >> 4 | (b & 0xF0));
  }
}

// 128 bytes with the low four bits of 256 codes, 64 with the high two, 16 signed scales, an f16
// factor. Codes minus 32 become codes minus 128.
void decode_q6_k(const std::uint8_t* block, const RowParts& out) {
  std::memcpy(out.scales, block + 192, 16);
  std::memcpy(out.factors, block + 208, 2);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, quarter = i % 128 / 32, column = i % 32;
    const std::uint8_t low = block[half * 64 + quarter % 2 * 32 + column] >> (quarter / 2 * 4) & 15;
    const std::uint8_t high = block[128 + half * 32 + column] >> (2 * quarter) & 3;
    out.values[i] = static_cast<std::uint8_t>((low | high << 4) + 128 - 32);
  }
}

struct BlockCodec {
  std::string_view name;
  QuantKey key;
  void (*decode)(const std::uint8_t* block, const RowParts& out);
  DType values;              ///< of the matrix
  std::int64_t value_bytes;  ///< what one block becomes
  DType scales;
  std::int64_t scale_bytes, zero_bytes, factor_bytes;
};

const std::array<BlockCodec, 5>& codecs() {
  static const std::array<BlockCodec, 5> kTable{{
      {"Q4_0", keys::int4(32), decode_q4_0, DType::kI32, 16, DType::kF16, 2, 0, 0},
      {"Q8_0", keys::int8(32), decode_q8_0, DType::kI32, 32, DType::kF16, 2, 0, 0},
      {"MXFP4", keys::mxfp4(), decode_mxfp4, DType::kU8, 16, DType::kU8, 1, 0, 0},
      {"Q4_K", keys::q4_k(), decode_q4_k, DType::kI32, 128, DType::kU8, 8, 8, 4},
      {"Q6_K", keys::q6_k(), decode_q6_k, DType::kI32, 256, DType::kI8, 16, 0, 2},
  }};
  return kTable;
}

const BlockCodec* find_codec(const files::GgmlType& type) {
  const auto found = std::find_if(codecs().begin(), codecs().end(),
                                  [&](const BlockCodec& codec) { return codec.name == type.name; });
  return found == codecs().end() ? nullptr : &*found;
}

}  // namespace

std::optional<QuantKey> key_of(const files::GgmlType& type) {
  const BlockCodec* codec = find_codec(type);
  return codec ? std::optional(codec->key) : std::nullopt;
}

std::string served_types() {
  std::string names = "F32, F16, BF16";
  for (const BlockCodec& codec : codecs()) names += core::format(", {}", codec.name);
  return names;
}

QuantizedMatrix decode_blocks(const Tensor& blocks, const files::GgmlType& type) {
  const BlockCodec* codec = find_codec(type);
  FUSEDMOE_CHECK_SUPPORTED(codec, kQuantScheme, "type", std::string(type.name), served_types());
  const std::int64_t row_bytes = blocks.size(blocks.rank() - 1);
  const std::int64_t rows = blocks.numel() / row_bytes, per_row = row_bytes / type.bytes;
  const auto part = [&](DType dtype, std::int64_t block_bytes) {
    if (block_bytes == 0) return Tensor();
    return Tensor::empty({rows, per_row * block_bytes * 8 / bits(dtype)}, dtype);
  };
  QuantizedMatrix result;
  result.values = part(codec->values, codec->value_bytes);
  result.scales = part(codec->scales, codec->scale_bytes);
  result.zero_points = part(DType::kU8, codec->zero_bytes);
  result.global_scale = part(DType::kF16, codec->factor_bytes);
  const auto at = [](const Tensor& tensor, std::int64_t byte) {
    return tensor ? tensor.as<std::uint8_t>() + byte : nullptr;
  };
  core::parallel_for(default_executor(), rows, true, [&](std::int64_t row) {
    const std::uint8_t* source = blocks.as<const std::uint8_t>() + row * row_bytes;
    for (std::int64_t i = row * per_row; i < (row + 1) * per_row; ++i, source += type.bytes) {
      codec->decode(source, {at(result.values, i * codec->value_bytes),
                             at(result.scales, i * codec->scale_bytes),
                             at(result.zero_points, i * codec->zero_bytes),
                             at(result.global_scale, i * codec->factor_bytes)});
    }
  });
  return result;
}

}  // namespace fusedmoe::checkpoint
