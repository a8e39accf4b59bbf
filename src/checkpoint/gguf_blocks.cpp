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

/// Two codes a byte.
template <typename CodeOf>
void put_nibbles(int count, std::uint8_t* values, CodeOf code_of) {
  for (int i = 0; i < count; i += 2) {
    values[i / 2] = static_cast<std::uint8_t>(code_of(i) | code_of(i + 1) << 4);
  }
}

template <typename CodeOf>
void put_bytes(int count, std::uint8_t* values, CodeOf code_of) {
  for (int i = 0; i < count; ++i) values[i] = static_cast<std::uint8_t>(code_of(i));
}

/// Code i of blocks of 32: the low nibbles of 16 bytes are the first 16 codes.
int nibble(const std::uint8_t* bytes, int i) {
  return bytes[i % 16] >> (i / 16 * 4) & 15;
}

/// Code i of blocks of 256: of each 32 bytes the low nibbles are 32 codes, the high ones the next.
int long_nibble(const std::uint8_t* bytes, int i) {
  return bytes[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
}

/// Two bits of each of 256 codes: of each 32 bytes the lowest ones are those of 32 codes, and so
/// on.
int bit_pair(const std::uint8_t* bytes, int i) {
  return bytes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
}

/// The fifth bit of code i of a block of 32.
int fifth_bit(const std::uint8_t* bits, int i) {
  return (bits[i / 8] >> (i % 8) & 1) << 4;
}

// f16 scale, 16 bytes; IQ4_NL, too.
void decode_q4_0(const std::uint8_t* block, const RowParts& out) {
  std::memcpy(out.scales, block, 2);
  put_nibbles(32, out.values, [&](int i) { return nibble(block + 2, i); });
}

// E8M0 scale, 16 bytes.
void decode_mxfp4(const std::uint8_t* block, const RowParts& out) {
  *out.scales = *block;
  put_nibbles(32, out.values, [&](int i) { return nibble(block + 1, i); });
}

// f16 scale, 32 signed bytes, which become unsigned ones around 128.
void decode_q8_0(const std::uint8_t* block, const RowParts& out) {
  std::memcpy(out.scales, block, 2);
  put_bytes(32, out.values, [&](int i) { return block[2 + i] ^ 0x80; });
}

// f16 scale, 32 fifth bits, 16 bytes. Codes minus 16 become codes minus 128.
void decode_q5_0(const std::uint8_t* block, const RowParts& out) {
  std::memcpy(out.scales, block, 2);
  put_bytes(32, out.values,
            [&](int i) { return (nibble(block + 6, i) | fifth_bit(block + 2, i)) + 128 - 16; });
}

/// f16 scale and f16 minimum, as the factors of one group whose scale and zero point are 1. The
/// zero point is subtracted, so the minimum takes the other sign.
void put_scale_and_minimum(const std::uint8_t* block, const RowParts& out) {
  std::memcpy(out.factors, block, 4);
  out.factors[3] ^= 0x80;
  *out.scales = *out.zero_points = 1;
}

// f16 scale, f16 minimum, 16 bytes.
void decode_q4_1(const std::uint8_t* block, const RowParts& out) {
  put_scale_and_minimum(block, out);
  put_nibbles(32, out.values, [&](int i) { return nibble(block + 4, i); });
}

// f16 scale, f16 minimum, 32 fifth bits, 16 bytes.
void decode_q5_1(const std::uint8_t* block, const RowParts& out) {
  put_scale_and_minimum(block, out);
  put_bytes(32, out.values, [&](int i) { return nibble(block + 8, i) | fifth_bit(block + 4, i); });
}

// 16 bytes with a scale and, above it, an offset of 4 bits each; 64 bytes; two f16 factors.
void decode_q2_k(const std::uint8_t* block, const RowParts& out) {
  for (int i = 0; i < 16; ++i) {
    out.scales[i] = block[i] & 15;
    out.zero_points[i] = block[i] >> 4;
  }
  std::memcpy(out.factors, block + 80, 4);
  put_nibbles(256, out.values, [&](int i) { return bit_pair(block + 16, i); });
}

// Third bits in 32 bytes, of which each bit belongs to 32 codes; 64 bytes; 16 scales of 6 bits
// around 32 in 12 bytes; an f16 factor. Codes minus 4 become codes minus 8.
void decode_q3_k(const std::uint8_t* block, const RowParts& out) {
  const std::uint8_t* packed = block + 96;
  for (int i = 0; i < 16; ++i) {
    const int low = packed[i % 8] >> (i / 8 * 4) & 15, high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
    out.scales[i] = static_cast<std::uint8_t>((low | high << 4) - 32);
  }
  std::memcpy(out.factors, block + 108, 2);
  put_nibbles(256, out.values, [&](int i) {
    const int third = block[i % 32] >> (i / 32) & 1;
    return (bit_pair(block + 32, i) | third << 2) + 8 - 4;
  });
}

/// Two f16 factors; 8 scales and 8 offsets of 6 bits in 12 bytes.
void put_scales_and_offsets(const std::uint8_t* block, const RowParts& out) {
  std::memcpy(out.factors, block, 4);
  const std::uint8_t* packed = block + 4;
  for (int i = 0; i < 4; ++i) {
    const std::uint8_t high = packed[8 + i];
    out.scales[i] = packed[i] & 63;
    out.zero_points[i] = packed[4 + i] & 63;
    out.scales[4 + i] = static_cast<std::uint8_t>((high & 15) | packed[i] >> 6 << 4);
    out.zero_points[4 + i] = static_cast<std::uint8_t>(high >> 4 | packed[4 + i] >> 6 << 4);
  }
}

// Factors, scales and offsets; 128 bytes.
void decode_q4_k(const std::uint8_t* block, const RowParts& out) {
  put_scales_and_offsets(block, out);
  put_nibbles(256, out.values, [&](int i) { return long_nibble(block + 16, i); });
}

// Factors, scales and offsets; fifth bits in 32 bytes, of which each bit belongs to 32 codes; 128
// bytes.
void decode_q5_k(const std::uint8_t* block, const RowParts& out) {
  put_scales_and_offsets(block, out);
  put_bytes(256, out.values, [&](int i) {
    return long_nibble(block + 48, i) | (block[16 + i % 32] >> (i / 32) & 1) << 4;
  });
}

// 128 bytes with the low four bits of 256 codes, 64 with the high two, 16 signed scales, an f16
// factor. Codes minus 32 become codes minus 128.
void decode_q6_k(const std::uint8_t* block, const RowParts& out) {
  std::memcpy(out.scales, block + 192, 16);
  std::memcpy(out.factors, block + 208, 2);
  put_bytes(256, out.values, [&](int i) {
    const int half = i / 128, quarter = i % 128 / 32, column = i % 32;
    const int low = block[half * 64 + quarter % 2 * 32 + column] >> (quarter / 2 * 4) & 15;
    return (low | bit_pair(block + 128, i) << 4) + 128 - 32;
  });
}

// An f16 factor; 8 scales of 6 bits around 32, the high two of all in 2 bytes, the low four in 4;
// 128 bytes, 16 for each 32 codes.
void decode_iq4_xs(const std::uint8_t* block, const RowParts& out) {
  std::memcpy(out.factors, block, 2);
  for (int i = 0; i < 8; ++i) {
    const int low = block[4 + i / 2] >> (i % 2 * 4) & 15,
              high = block[2 + i / 4] >> (i % 4 * 2) & 3;
    out.scales[i] = static_cast<std::uint8_t>((low | high << 4) - 32);
  }
  put_nibbles(256, out.values, [&](int i) { return nibble(block + 8 + i / 32 * 16, i % 32); });
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

const std::array<BlockCodec, 13>& codecs() {
  using enum DType;
  static const std::array<BlockCodec, 13> kTable{{
      {"Q4_0", keys::int4(32), decode_q4_0, kI32, 16, kF16, 2, 0, 0},
      {"Q4_1", keys::q4_1(), decode_q4_1, kI32, 16, kU8, 1, 1, 4},
      {"Q5_0", keys::int8(32), decode_q5_0, kI32, 32, kF16, 2, 0, 0},
      {"Q5_1", keys::q5_1(), decode_q5_1, kI32, 32, kU8, 1, 1, 4},
      {"Q8_0", keys::int8(32), decode_q8_0, kI32, 32, kF16, 2, 0, 0},
      {"MXFP4", keys::mxfp4(), decode_mxfp4, kU8, 16, kU8, 1, 0, 0},
      {"IQ4_NL", keys::iq4_nl(), decode_q4_0, kI32, 16, kF16, 2, 0, 0},
      {"Q2_K", keys::q2_k(), decode_q2_k, kI32, 128, kU8, 16, 16, 4},
      {"Q3_K", keys::q3_k(), decode_q3_k, kI32, 128, kI8, 16, 0, 2},
      {"Q4_K", keys::q4_k(), decode_q4_k, kI32, 128, kU8, 8, 8, 4},
      {"Q5_K", keys::q5_k(), decode_q5_k, kI32, 256, kU8, 8, 8, 4},
      {"Q6_K", keys::q6_k(), decode_q6_k, kI32, 256, kI8, 16, 0, 2},
      {"IQ4_XS", keys::iq4_xs(), decode_iq4_xs, kI32, 128, kI8, 8, 0, 2},
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
