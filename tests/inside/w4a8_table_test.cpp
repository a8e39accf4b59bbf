// W4A8 weights by look-up, as the GPU decodes them: every code times every E4M3 scale, from every
// place of a packed word.
#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/gemm/operands/codes.h"
#include "cuda/gemm/operands/w4a8_table.h"
#include "fusedmoe/quant.h"

namespace fusedmoe {
namespace {

using cuda::BitPlace;
using cuda::W4a8Codes;
using cuda::W4a8Table;

W4a8Table table_of(float scale) {
  std::uint32_t multiples[2] = {};
  for (int i = 0; i < 8; ++i) {
    multiples[i / 4] |= std::uint32_t{f32_to_e4m3(scale * static_cast<float>(i + 1))}
                        << (i % 4 * 8);
  }
  return W4a8Table::of_multiples(multiples[0], multiples[1]);
}

TEST(W4a8TableTest, EveryCodeTimesEveryScaleIsRoundedAsDefined) {
  for (int s = 0; s < 256; ++s) {
    if ((s & 0x7F) == 0x7F) continue;  // NaN
    const float scale = e4m3_to_f32(static_cast<std::uint8_t>(s));
    const W4a8Table table = table_of(scale);
    // Eight neighbouring codes in a word: each code is in each place once.
    for (unsigned shift = 0; shift < 16; ++shift) {
      std::uint32_t word = 0;
      const auto code_of = [&](int half, int element) {
        return (static_cast<unsigned>(4 * half + element) + shift) % 16;
      };
      for (int half = 0; half < 2; ++half) {
        for (int element = 0; element < 4; ++element) {
          for (int bit = 0; bit < W4a8Codes::kBits; ++bit) {
            const BitPlace place = W4a8Codes::place(0, 2 * half, element, bit);
            ASSERT_EQ(place.word, 0);
            word |= (code_of(half, element) >> bit & 1U) << place.bit;
          }
        }
      }
      std::uint32_t weights[2];
      table.decode(word, weights[0], weights[1]);
      for (int half = 0; half < 2; ++half) {
        for (int element = 0; element < 4; ++element) {
          const int code = static_cast<int>(code_of(half, element));
          const auto weight = static_cast<std::uint8_t>(weights[half] >> (8 * element));
          // Zeros may have either sign.
          ASSERT_EQ(e4m3_to_f32(weight),
                    e4m3_to_f32(f32_to_e4m3(static_cast<float>(code - 8) * scale)))
              << "code " << code << ", scale " << scale;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe
