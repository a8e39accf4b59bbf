// Each level quantizes rows, and turns codes back into values, with its own instructions. The bytes
// must be those of core::quantize_row(), which quantize_test.cpp compares with an oracle, and the
// values those of load_f32().
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/levels.h"
#include "fusedmoe/quant.h"
#include "quant/quantize.h"
#include "testing/cases.h"

namespace fusedmoe::cpu_quantize_test {

constexpr std::int64_t kCounts[] = {0, 1, 15, 16, 31, 90, 360, 1024, 1025, 2880, 5000};

QuantKey key_of(DType value, std::int64_t group, bool full_range = false) {
  QuantKey key = value == DType::kE4M3 ? keys::e4m3_group()
                 : value == DType::kI8 ? keys::int8_group(group)
                                       : keys::int16_group(group);
  key.group.cols = group;
  key.full_range = full_range;
  return key;
}

std::vector<QuantKey> all_keys() {
  std::vector<QuantKey> keys{keys::e4m3_tensor(),    keys::e4m3_row(true), keys::e4m3_group(),
                             keys::e4m3_group(true), keys::mxfp8(true),    keys::nvfp4(true),
                             keys::int8_row(true)};
  for (const MxScaleRule rule :
       {MxScaleRule::kOcp, MxScaleRule::kEven, MxScaleRule::kCeil, MxScaleRule::kFloor}) {
    keys.push_back(keys::mxfp4(true, rule));
  }
  for (const std::int64_t group : {1, 24, 32, 64, 256, 1500, 4096}) {
    for (const DType value : {DType::kE4M3, DType::kI8, DType::kI16}) {
      keys.push_back(key_of(value, group));
    }
    keys.push_back(key_of(DType::kI8, group, true));
  }
  return keys;
}

/// Random values of many magnitudes, among them zeros, whole groups of them, infinities and NaN.
std::vector<float> row_of(std::int64_t count, testing::Random& random) {
  std::vector<float> row(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < row.size(); ++i) {
    row[i] = std::ldexp(random.normal(), static_cast<int>(random.below(40)) - 30);
    if (i / 128 % 5 == 3 || random.below(50) == 0) row[i] = random.below(2) == 0 ? 0.0F : -0.0F;
    if (i / 32 % 7 == 2) row[i] *= 1e-38F;
    if (random.below(300) == 0) row[i] = std::numeric_limits<float>::quiet_NaN();
    if (random.below(900) == 0) row[i] = -std::numeric_limits<float>::infinity();
  }
  return row;
}

struct Quantized {
  std::vector<std::uint8_t> codes, scales;
  bool operator==(const Quantized&) const = default;
};
template <class Function>
Quantized quantized(const Function& function, const std::vector<float>& row, const QuantKey& key,
                    float scale = 0.37F) {
  // One byte more than is written, which must stay.
  const auto count = static_cast<std::int64_t>(row.size());
  const std::int64_t code_bytes =
      key.value == DType::kE2M1 ? (count + 1) / 2 : bytes(key.value, count);
  const std::int64_t scale_bytes = bytes(*key.scale, core::scales_per_row(key, count));
  Quantized result{std::vector<std::uint8_t>(static_cast<std::size_t>(code_bytes) + 1, 0xa5),
                   std::vector<std::uint8_t>(static_cast<std::size_t>(scale_bytes) + 1, 0xa5)};
  function(row.data(), count, key, scale, result.codes.data(), result.scales.data());
  EXPECT_EQ(result.codes.back(), 0xa5);
  EXPECT_EQ(result.scales.back(), 0xa5);
  return result;
}

TEST(CpuQuantizeTest, EveryLevelWritesTheSameBytes) {
  testing::Random random(0xc0de);
  for (const QuantKey& key : all_keys()) {
    for (const std::int64_t count : kCounts) {
      const std::vector<float> row = row_of(count, random);
      const Quantized expected = quantized(core::quantize_row, row, key);
      for (const cpu::Kernels* level : cpu::levels()) {
        EXPECT_TRUE(quantized(level->quantize_row, row, key) == expected)
            << level->name << ", " << count << " of " << name(key.value) << " in groups of "
            << key.group.cols;
      }
    }
  }
}

TEST(CpuQuantizeTest, WithAScaleThatHasNoReciprocalAllValuesCountAsZero) {
  const std::vector<float> row{1, -1, 0.5F, 1e30F};
  for (const float scale : {0.0F, -0.0F, 1e-45F}) {
    for (const cpu::Kernels* level : cpu::levels()) {
      const Quantized result = quantized(level->quantize_row, row, keys::e4m3_tensor(), scale);
      for (std::size_t i = 0; i < row.size(); ++i) {
        EXPECT_EQ(result.codes[i] & 0x7f, 0) << level->name << ", " << scale;
      }
    }
  }
}

TEST(CpuQuantizeTest, EveryLevelReadsCodesAsTheFormatsSay) {
  testing::Random random(0xdec0de);
  for (const DType type : {DType::kE4M3, DType::kE2M1, DType::kI8, DType::kI16}) {
    for (const std::int64_t count : kCounts) {
      if (count == 0) continue;
      for (const std::int64_t group :
           {std::int64_t{16}, std::int64_t{24}, std::int64_t{128}, std::int64_t{1500}, count}) {
        std::vector<std::uint8_t> codes(static_cast<std::size_t>(2 * count));
        for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(random.below(256));
        std::vector<float> scales(static_cast<std::size_t>((count + group - 1) / group));
        for (float& scale : scales)
          scale = std::ldexp(1.0F, static_cast<int>(random.below(30)) - 15);
        for (const cpu::Kernels* level : cpu::levels()) {
          std::vector<float> values(codes.size());
          std::vector<std::uint16_t> halves(codes.size());
          level->expand_codes(codes.data(), count, type, scales.data(), group, false,
                              values.data());
          level->expand_codes(codes.data(), count, type, scales.data(), group, true, halves.data());
          for (std::int64_t i = 0; i < count; ++i) {
            const float value = load_f32(codes.data(), type, i) * scales[i / group];
            const auto bits = std::bit_cast<std::uint32_t>(value),
                       got = std::bit_cast<std::uint32_t>(values[i]);
            ASSERT_EQ(got, bits) << level->name << ", " << name(type) << ", element " << i;
            ASSERT_EQ(halves[i], bits >> 16)
                << level->name << ", " << name(type) << ", element " << i;
          }
        }
      }
    }
  }
}

}  // namespace fusedmoe::cpu_quantize_test
