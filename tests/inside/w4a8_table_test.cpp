// W4A8 and MXFP4 weights by look-up, as the GPU decodes them: every code times every scale, from
// every place of a packed word.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/formats/codes.h"
#include "cuda/formats/mxfp4_table.h"
#include "cuda/formats/w4a8_table.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::w4a8_table_test {

using cuda::BitPlace;
using cuda::Mxfp4Packed;
using cuda::Mxfp4Table;
using cuda::W4a8Codes;
using cuda::W4a8Table;

/// The code at a place of a word: with another `shift` each code is in each place once.
unsigned code_at(int half, int element, unsigned shift) {
  return (static_cast<unsigned>(4 * half + element) + shift) % 16;
}
/// The word of eight codes; `code_of(half, element)`.
template <typename CodeOf>
std::uint32_t word_of(const CodeOf& code_of) {
  std::uint32_t word = 0;
  for (int half = 0; half < 2; ++half) {
    for (int element = 0; element < 4; ++element) {
      for (int bit = 0; bit < W4a8Codes::kBits; ++bit) {
        const BitPlace place = W4a8Codes::place(0, 2 * half, element, bit);
        EXPECT_EQ(place.word, 0);
        word |= (code_of(half, element) >> bit & 1U) << place.bit;
      }
    }
  }
  return word;
}
/// Calls function(half, element, value) for the E4M3 weights that a table makes of a word.
template <typename Table, typename Function>
void for_weights(const Table& table, std::uint32_t word, const Function& function) {
  std::uint32_t weights[2];
  table.decode(word, weights[0], weights[1]);
  for (int half = 0; half < 2; ++half) {
    for (int element = 0; element < 4; ++element) {
      function(half, element,
               e4m3_to_f32(static_cast<std::uint8_t>(weights[half] >> (8 * element))));
    }
  }
}

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
    for (unsigned shift = 0; shift < 16; ++shift) {
      const std::uint32_t word =
          word_of([=](int half, int element) { return code_at(half, element, shift); });
      for_weights(table, word, [&](int half, int element, float weight) {
        const auto code = static_cast<int>(code_at(half, element, shift));
        // Zeros may have either sign.
        EXPECT_EQ(weight, e4m3_to_f32(f32_to_e4m3(static_cast<float>(code - 8) * scale)))
            << "code " << code << ", scale " << scale;
      });
    }
  }
}

TEST(Mxfp4TableTest, WeightsAreExactDownToTheSmallestFieldAndRoundedBelow) {
  constexpr int kSpan = Mxfp4Table::kLargestField - 1;
  for (const int largest : {3, 100, 254}) {
    for (int scale = 0; scale <= largest; ++scale) {
      // Below: E2M1 numbers of the smallest scale that there is.
      const int kept = std::max(scale, largest - kSpan);
      const auto packed = [=](unsigned code) {
        return Mxfp4Table::pack(static_cast<std::uint8_t>(code), scale, largest);
      };
      const int field = packed(0).field;
      ASSERT_EQ(Mxfp4Table::scale_of(field, largest), kept);
      for (unsigned shift = 0; shift < 16; ++shift) {
        const std::uint32_t word = word_of([&](int half, int element) -> unsigned {
          return packed(code_at(half, element, shift)).code;
        });
        const Mxfp4Table table(static_cast<std::uint32_t>(field));
        for_weights(table, word, [&](int half, int element, float weight) {
          const auto code = static_cast<std::uint8_t>(code_at(half, element, shift));
          const float exact = std::ldexp(e2m1_to_f32(code), scale - kept);
          const float stored = scale == kept ? exact : e2m1_to_f32(f32_to_e2m1(exact));
          EXPECT_EQ(weight, std::ldexp(stored, kept - largest + Mxfp4Table::kLargestExponent))
              << "code " << int{code} << ", scale " << scale << " of " << largest;
        });
      }
    }
  }
}

}  // namespace fusedmoe::w4a8_table_test
