// Elements of the reference's matrices: loads, stores, and codes of every value.
#include "reference/matrix.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::reference_matrix_test {

TEST(ReferenceMatrixTest, RoundsOnceToNearestEven) {
  using reference::round_to;
  // Just above a tie of bf16: through f32 it would fall on the tie and then to even.
  const double above = 1 + 0x1p-8 + 0x1p-40;
  EXPECT_EQ(round_to(DType::kBF16, above), 1 + 0x1p-7);
  EXPECT_EQ(round_to(DType::kBF16, 1 + 0x1p-8), 1);
  EXPECT_EQ(round_to(DType::kBF16, 1 + 3 * 0x1p-8), 1 + 0x1p-6);
  EXPECT_EQ(round_to(DType::kF16, 65519.99), 65504);
  EXPECT_EQ(round_to(DType::kF16, -65520), -INFINITY);
  EXPECT_EQ(round_to(DType::kF16, 0x1p-25), 0);
  EXPECT_EQ(round_to(DType::kF16, 0x1.8p-24), 0x1p-23);
  EXPECT_EQ(round_to(DType::kF32, 1e-300), 0);
  EXPECT_EQ(round_to(DType::kF32, 0x1p-149), 0x1p-149);
  EXPECT_TRUE(std::isnan(round_to(DType::kBF16, std::nan(""))));
}

TEST(ReferenceMatrixTest, EveryF16AndBf16CodeSurvivesLoadAndStore) {
  for (DType dtype : {DType::kF16, DType::kBF16}) {
    for (int i = 0; i < 0x10000; ++i) {
      const auto code = static_cast<std::uint16_t>(i);
      const double value = reference::load(&code, dtype, 0);
      const float expected = load_f32(&code, dtype, 0);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(value));
        continue;
      }
      ASSERT_EQ(value, expected);
      std::uint16_t back = 0;
      reference::store(&back, dtype, 0, value);
      ASSERT_EQ(back, code);
    }
  }
}

TEST(ReferenceMatrixTest, DecodesEveryMxfp4CodeAndScale) {
  std::vector<std::uint8_t> codes(16), scale(1);
  for (int i = 0; i < 16; ++i) codes[i] = static_cast<std::uint8_t>(i | (15 - i) << 4);
  const WeightMatrix matrix{TensorView(codes.data(), DType::kU8, {1, 16}),
                            TensorView(scale.data(), DType::kU8, {1, 1}),
                            {}};
  for (int s = 0; s < 256; ++s) {
    scale[0] = static_cast<std::uint8_t>(s);
    for (std::int64_t column = 0; column < 32; ++column) {
      const double actual = reference::element(matrix, keys::mxfp4(), 0, column);
      const std::uint8_t code = codes[column / 2] >> (column % 2 * 4) & 15;
      const double expected = double{e2m1_to_f32(code)} * e8m0_to_f32(scale[0]);
      ASSERT_TRUE(actual == expected || (s == 255 && std::isnan(actual))) << s << " " << column;
    }
  }
}

}  // namespace fusedmoe::reference_matrix_test
