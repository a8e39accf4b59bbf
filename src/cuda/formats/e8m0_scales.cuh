// E8M0 scales per 32 of K in packed blocks, as exponent fields of the multipliers of 16-bit codes.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "cuda/formats/pack_decoded.cuh"
#include "fusedmoe/error.h"

namespace fusedmoe::cuda {

/// Smallest and largest code.
inline std::pair<int, int> range_of(const TensorView& scales) {
  int smallest = 255, largest = 0;
  for (std::int64_t r = 0; r < scales.size(0); ++r) {
    const auto* row = scales.as<const std::uint8_t>() + r * scales.stride(0);
    for (std::int64_t c = 0; c < scales.size(1); ++c) {
      smallest = std::min<int>(smallest, row[c * scales.stride(1)]);
      largest = std::max<int>(largest, row[c * scales.stride(1)]);
    }
  }
  return {smallest, largest};
}
/// The same of both matrices.
inline std::pair<int, int> range_of(const WeightMatrix& gate, const WeightMatrix* up) {
  auto [smallest, largest] = range_of(gate.scales);
  if (up) {
    const auto [least, most] = range_of(up->scales);
    smallest = std::min(smallest, least);
    largest = std::max(largest, most);
  }
  return {smallest, largest};
}

/// Multipliers of bf16: fields in [1, 254].
template <typename Operands>
int exponent_shift_bf16(const WeightMatrix& gate, const WeightMatrix* up) {
  constexpr int kMost = 254 - Operands::kOffset;
  const auto [smallest, largest] = range_of(gate, up);
  const int shift = std::max(0, largest - kMost);
  if (smallest + Operands::kOffset - shift < 1) {
    throw Error::unsupported(Reason::kQuantScheme, "weights.scales",
                             "from 2^" + std::to_string(smallest - 127) + " to 2^" +
                                 std::to_string(largest - 127) + " in one expert",
                             "within a factor of 2^253");
  }
  return shift;
}
/// Multipliers of f16: the largest scale becomes 1.
inline int exponent_shift_f16(const WeightMatrix& gate, const WeightMatrix* up) {
  return range_of(gate, up).second - 127;
}

template <typename Operands>
struct E8m0Scales {
  static constexpr DType kDType = DType::kU8;

  /// The exponent field of a scale. 0, the multiplier 0: too small for f16.
  __device__ static int field_at(const PackSource& s, std::int64_t row, std::int64_t k) {
    const bool has_scale = s.scale_dtype == DType::kU8 || s.scale_dtype == DType::kE8M0;
    const int code =
        has_scale ? static_cast<const std::uint8_t*>(s.scales)[s.scale_index(row, k)] : 127;
    return max(code + Operands::kOffset - s.exponent_shift, 0);
  }
  /// Codes that count as 0 are 0, so that unpacking gives 0, too.
  __device__ static std::uint32_t code(const PackSource& s, std::int64_t row, std::int64_t k,
                                       std::uint32_t code, bool inside) {
    return inside && field_at(s, row, k) > 0 ? code : 0;
  }
  FUSEDMOE_HD static int place(const RowInBlock& row, int group) {
    return row.pair() * 4 + row.half * 2 + group;
  }
  __device__ static void store(const PackSource& s, std::int64_t row, std::int64_t k, bool inside,
                               std::uint8_t* area, const RowInBlock& to, int group) {
    area[place(to, group)] = static_cast<std::uint8_t>(inside ? field_at(s, row, k) : 1);
  }
  static void load(const PackedView& source, const std::byte* area, const RowInBlock& row,
                   int group, std::int64_t scale, const UnpackedRow& target) {
    static_cast<std::uint8_t*>(target.scales)[scale] = static_cast<std::uint8_t>(
        static_cast<int>(area[place(row, group)]) - Operands::kOffset + source.exponent_shift);
  }
};

}  // namespace fusedmoe::cuda
