// llama.cpp's blocks: codes in groups, whose scales and zero points are integers times factors of
// their block. Plain formulas from ranges, without the search for better scales that llama.cpp
// makes.
#include <algorithm>
#include <array>
#include <cmath>

#include "fusedmoe/quant.h"
#include "quant/quantize.h"

namespace fusedmoe::core {
namespace {

constexpr float kF16Max = 65504.0F;
constexpr float kIq4Max = 113.0F;  // the largest integer; the smallest is -127

/// The f16 code of the factor that makes `largest` the integer `steps`.
std::uint16_t factor_code(float largest, float steps) {
  return f32_to_f16(std::min(largest / steps, kF16Max));
}

/// value / unit as an integer from 0 to `largest`.
std::uint8_t nearest(float value, float unit, float largest) {
  if (unit == 0) return 0;
  return static_cast<std::uint8_t>(std::clamp(std::nearbyint(value / unit), 0.0F, largest));
}

/// What a group of codes has to reach: values from -offset on, the largest code times scale above.
struct Range {
  float scale = 0, offset = 0;
};

Range range_of(const float* x, std::int64_t count, const BlockFormat& format) {
  const auto [low, high] = std::minmax_element(x, x + count);
  if (!format.key.symmetric) {
    const float offset = std::max(-*low, 0.0F);
    return {(std::max(*high, 0.0F) + offset) / format.codes, offset};
  }
  const float reach = format.key.value == DType::kIq4 ? kIq4Max : format.codes - format.middle;
  return {std::max(std::abs(*low), std::abs(*high)) / reach, 0};
}

}  // namespace

const BlockFormat* find_block_format(const QuantKey& key) {
  static const std::array<BlockFormat, 8> kTable{{{keys::q2_k(), 3, 0, 15, 0},
                                                  {keys::q3_k(), 7, 4, 31, 4},
                                                  {keys::q4_k(), 15, 0, 63, 0},
                                                  {keys::q5_k(), 31, 0, 63, 0},
                                                  {keys::q6_k(), 63, 32, 127, 96},
                                                  {keys::q4_1(), 15, 0, 1, 0},
                                                  {keys::q5_1(), 31, 0, 1, 0},
                                                  {keys::iq4_xs(), 15, 0, 31, 0}}};
  const auto found = std::find_if(kTable.begin(), kTable.end(),
                                  [&](const BlockFormat& format) { return format.key == key; });
  return found == kTable.end() ? nullptr : &*found;
}

std::uint8_t iq4_code(float value) {
  // Halfway between neighbours.
  constexpr float kBelowZero[8] = {-115.5F, -93.5F, -74.0F, -57.0F, -42.0F, -28.5F, -16.0F, -4.5F};
  constexpr float kAboveZero[7] = {7.0F, 19.0F, 31.5F, 45.5F, 61.0F, 79.0F, 101.0F};
  int code = 0;
  for (const float middle : kBelowZero) code += value >= middle;
  for (const float middle : kAboveZero) code += value > middle;
  return static_cast<std::uint8_t>(code);
}

void quantize_block(const float* x, std::int64_t count, const QuantKey& key, std::uint8_t* codes,
                    const BlockScales& out) {
  const BlockFormat& format = *find_block_format(key);
  const bool offsets = !key.symmetric;
  const std::int64_t width = key.group.cols;
  Range largest;
  for (std::int64_t begin = 0; begin < count; begin += width) {
    const Range range = range_of(x + begin, std::min(width, count - begin), format);
    largest.scale = std::max(largest.scale, range.scale);
    largest.offset = std::max(largest.offset, range.offset);
  }
  out.factors[0] = factor_code(largest.scale, format.scales);
  if (offsets) out.factors[1] = factor_code(largest.offset, format.scales);
  const float scale_unit = f16_to_f32(out.factors[0]);
  const float offset_unit = offsets ? f16_to_f32(out.factors[1]) : 0;
  for (std::int64_t begin = 0; begin < count; begin += width) {
    const std::int64_t end = std::min(count, begin + width), group = begin / width;
    const Range range = range_of(x + begin, end - begin, format);
    out.scales[group] = nearest(range.scale, scale_unit, format.scales);
    if (offsets) out.zero_points[group] = nearest(range.offset, offset_unit, format.scales);
    const float scale = scale_unit * out.scales[group];
    const float offset = offsets ? offset_unit * out.zero_points[group] : format.middle * scale;
    for (std::int64_t i = begin; i < end; ++i) {
      if (key.value == DType::kIq4) {
        codes[i] = scale == 0 ? 0 : iq4_code(x[i] / scale);
        continue;
      }
      // Without a scale every code is zero's.
      const float code =
          scale == 0 && !offsets ? format.middle : nearest(x[i] + offset, scale, format.codes);
      codes[i] = static_cast<std::uint8_t>(static_cast<int>(code) + format.shift);
    }
  }
}

}  // namespace fusedmoe::core
