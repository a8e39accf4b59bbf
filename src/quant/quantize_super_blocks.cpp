// Q4_K and Q6_K: integer codes in groups, whose scales are integers times a factor of their block
// of 256. Plain formulas from ranges, without the search for better scales that llama.cpp makes.
#include <algorithm>
#include <cmath>

#include "fusedmoe/quant.h"
#include "quant/quantize.h"

namespace fusedmoe::core {
namespace {

constexpr float kF16Max = 65504.0F;

/// The f16 code of the factor that makes `largest` the integer `steps`.
std::uint16_t factor_code(float largest, float steps) {
  return f32_to_f16(std::min(largest / steps, kF16Max));
}

/// value / unit as an integer from 0 to `largest`.
std::uint8_t nearest(float value, float unit, float largest) {
  if (unit == 0) return 0;
  return static_cast<std::uint8_t>(std::clamp(std::nearbyint(value / unit), 0.0F, largest));
}

/// What a group of codes has to reach: values from -offset to 15 or 31 times scale.
struct Range {
  float scale = 0, offset = 0;
};

Range range_of(const float* x, std::int64_t count, bool with_offset) {
  const auto [low, high] = std::minmax_element(x, x + count);
  if (with_offset) {
    const float offset = std::max(-*low, 0.0F);
    return {(std::max(*high, 0.0F) + offset) / 15, offset};
  }
  return {std::max(std::abs(*low), std::abs(*high)) / 31, 0};
}

}  // namespace

void quantize_super_block(const float* x, std::int64_t count, const QuantKey& key,
                          std::uint8_t* codes, const SuperBlockScales& out) {
  const bool offsets = !key.symmetric;
  const std::int64_t width = key.group.cols;
  const float steps = offsets ? 63.0F : 127.0F;
  Range largest;
  for (std::int64_t begin = 0; begin < count; begin += width) {
    const Range range = range_of(x + begin, std::min(width, count - begin), offsets);
    largest.scale = std::max(largest.scale, range.scale);
    largest.offset = std::max(largest.offset, range.offset);
  }
  out.factors[0] = factor_code(largest.scale, steps);
  if (offsets) out.factors[1] = factor_code(largest.offset, steps);
  const float scale_unit = f16_to_f32(out.factors[0]);
  const float offset_unit = offsets ? f16_to_f32(out.factors[1]) : 0;
  for (std::int64_t begin = 0; begin < count; begin += width) {
    const std::int64_t end = std::min(count, begin + width), group = begin / width;
    const Range range = range_of(x + begin, end - begin, offsets);
    out.scales[group] = nearest(range.scale, scale_unit, steps);
    if (offsets) out.zero_points[group] = nearest(range.offset, offset_unit, steps);
    const float scale = scale_unit * out.scales[group];
    const float offset = offsets ? offset_unit * out.zero_points[group] : 32 * scale;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::uint8_t code = nearest(x[i] + offset, scale, offsets ? 15.0F : 63.0F);
      // 6-bit codes minus 32 are 8-bit codes minus 128. Without a scale every code is zero's.
      codes[i] = offsets ? code : static_cast<std::uint8_t>(scale == 0 ? 128 : code + 96);
    }
  }
}

}  // namespace fusedmoe::core
