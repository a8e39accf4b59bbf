#include "cuda/gemm/unpack.h"

#include <algorithm>
#include <cstring>

namespace fusedmoe::cuda {
namespace {

const std::byte* record_of(const RecordView& source, std::int64_t row, std::int64_t k) {
  const std::int64_t record = row / kRecordRows * source.k_blocks + k / kRecordK;
  return source.records + record * record_bytes(source.format);
}

void unpack_plain(const RecordView& source, std::int64_t row, std::byte* values) {
  constexpr std::int64_t kChunk = 8;  // elements
  const std::int64_t r = row % kRecordRows;
  for (std::int64_t k = 0; k < source.k; k += kChunk) {
    const std::int64_t chunk = k % kRecordK / kChunk ^ r % 8;
    std::memcpy(values + 2 * k, record_of(source, row, k) + 2 * (r * kRecordK + chunk * kChunk),
                static_cast<std::size_t>(2 * std::min(kChunk, source.k - k)));
  }
}

/// Where a row of a record has its bits: the thread group and which of its two rows it is.
struct RowInRecord {
  std::int64_t warp, group, half;
  explicit RowInRecord(std::int64_t row)
      : warp(row % kRecordRows / 16), group(row % 8), half(row % 16 / 8) {}
};

std::uint8_t code_at(const std::byte* record, const RowInRecord& row, std::int64_t k) {
  const std::int64_t quad = k % 8 / 2, thread = row.warp * 32 + row.group * 4 + quad;
  const int step = static_cast<int>(k % kRecordK / 16);
  std::uint32_t words[2];  // the two that code_bits() speaks of
  std::memcpy(words, record + 16 * thread + 8 * (step / 2), sizeof(words));
  const CodeBits bits = code_bits(step % 2, static_cast<int>(row.half + k % 16 / 8 * 2));
  const int shift = static_cast<int>(k % 2 * 16);
  const auto at = [&](CodeBit bit) { return words[bit.word] >> (bit.bit + shift) & 1U; };
  return static_cast<std::uint8_t>(at(bits.sign) << 3 | at(bits.exponent_high) << 2 |
                                   at(bits.exponent_low) << 1 | at(bits.mantissa));
}

void unpack_mxfp4(const RecordView& source, std::int64_t row, std::uint8_t* values,
                  std::uint8_t* scales) {
  const RowInRecord place(row);
  std::fill_n(values, (source.k + 1) / 2, std::uint8_t{0});
  for (std::int64_t k = 0; k < source.k; ++k) {
    const std::byte* record = record_of(source, row, k);
    values[k / 2] |= static_cast<std::uint8_t>(code_at(record, place, k) << (k % 2 * 4));
    if (k % 32 != 0) continue;
    const std::int64_t index =
        (place.warp * 8 + place.group) * 4 + place.half * 2 + k % kRecordK / 32;
    // Inverse of the multiplier's exponent field.
    scales[k / 32] = static_cast<std::uint8_t>(static_cast<int>(record[kMxfp4CodeBytes + index]) -
                                               126 + source.exponent_shift);
  }
}

}  // namespace

void unpack_row(const RecordView& source, std::int64_t row, void* values, std::uint8_t* scales) {
  if (is_decoded(source.format)) {
    unpack_mxfp4(source, row, static_cast<std::uint8_t*>(values), scales);
  } else {
    unpack_plain(source, row, static_cast<std::byte*>(values));
  }
}

}  // namespace fusedmoe::cuda
