// Layouts of scales and packed codes: published offsets, examples by hand, and round trips of odd
// sizes.
#include "fusedmoe/quant.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace fusedmoe::scale_layout_test {

Tensor random_bytes(const Shape& shape, DType dtype, std::uint8_t mask = 0xff) {
  testing::Random random(5);
  Tensor result = Tensor::empty(shape, dtype);
  for (std::int64_t i = 0; i < result.nbytes(); ++i) {
    result.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(random.bits() >> 56) & mask;
  }
  return result;
}

bool same(const TensorView& a, const TensorView& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), a.nbytes()) == 0;
}

TEST(TiledScalesTest, PublishedOffsets) {
  EXPECT_EQ(tiled_scale_offset(0, 0, 8), 0);
  EXPECT_EQ(tiled_scale_offset(1, 0, 8), 16);
  EXPECT_EQ(tiled_scale_offset(32, 0, 8), 4);
  EXPECT_EQ(tiled_scale_offset(0, 4, 8), 512);
  EXPECT_EQ(tiled_scale_offset(128, 0, 8), 1024);
  EXPECT_EQ(tiled_scales_bytes(129, 5), 256 * 8);
}

TEST(TiledScalesTest, EveryOffsetOnce) {
  std::set<std::int64_t> seen;
  for (std::int64_t r = 0; r < 256; ++r) {
    for (std::int64_t c = 0; c < 12; ++c) seen.insert(tiled_scale_offset(r, c, 12));
  }
  EXPECT_EQ(seen.size(), 256U * 12);
  EXPECT_EQ(*seen.rbegin(), tiled_scales_bytes(256, 12) - 1);
}

TEST(TiledScalesTest, EqualsReshapeAndPermute) {
  // Zero-padded (mT, 4, 32, kT, 4) permuted to (mT, kT, 32, 4, 4).
  const Tensor flat = random_bytes({130, 7}, DType::kE4M3);
  const Tensor tiled = Tensor::empty(tiled_scales_shape(flat.shape()), DType::kE4M3);
  ASSERT_EQ(tiled.shape(), (Shape{2, 2, 32, 4, 4}));
  tile_scales(flat, tiled);
  for (std::int64_t i = 0; i < tiled.numel(); ++i) {
    const std::int64_t c4 = i % 4, quarter = i / 4 % 4, r32 = i / 16 % 32, k = i / 512 % 2,
                       m = i / 1024;
    const std::int64_t row = m * 128 + quarter * 32 + r32, column = k * 4 + c4;
    const bool real = row < 130 && column < 7;
    ASSERT_EQ(tiled.as<std::uint8_t>()[i], real ? flat.as<std::uint8_t>()[row * 7 + column] : 0);
  }
}

TEST(TiledScalesTest, RoundTripsOfOddSizesAndStacks) {
  for (const Shape& shape : {Shape{1, 1}, Shape{90, 12}, Shape{129, 5}, Shape{3, 200, 23}}) {
    const Tensor flat = random_bytes(shape, DType::kE8M0);
    const Tensor tiled = Tensor::empty(tiled_scales_shape(shape), DType::kE8M0);
    const Tensor back = Tensor::zeros(shape, DType::kE8M0);
    tile_scales(flat, tiled);
    untile_scales(tiled, back);
    EXPECT_TRUE(same(flat, back)) << to_string(shape);
  }
  // Expert e of a stack is what it is alone.
  const Tensor flat = random_bytes({2, 60, 6}, DType::kU8);
  const Tensor all = Tensor::empty(tiled_scales_shape(flat.shape()), DType::kU8);
  const Tensor one = Tensor::empty({1, 2, 32, 4, 4}, DType::kU8);
  tile_scales(flat, all);
  tile_scales(flat.select(0, 1), one);
  EXPECT_TRUE(same(all.select(0, 1), one));
}

TEST(PackedCodesTest, OrdersByHand) {
  const Tensor codes = Tensor::empty({1, 8}, DType::kU8);
  for (int i = 0; i < 8; ++i) codes.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(i);
  const Tensor word = Tensor::empty({1, 1}, DType::kI32);
  pack_codes(codes, word);
  EXPECT_EQ(*word.as<std::uint32_t>(), 0x76543210U);
  // Bits 4i hold column order[i] of 0, 2, 4, 6, 1, 3, 5, 7.
  pack_codes(codes, word, 4, CodeOrder::kAwq);
  EXPECT_EQ(*word.as<std::uint32_t>(), 0x75316420U);
}

TEST(PackedCodesTest, RoundTripsAndTransposedViews) {
  for (const auto& [width, order] :
       {std::pair{4, CodeOrder::kSequential}, {4, CodeOrder::kAwq}, {8, CodeOrder::kSequential}}) {
    const Tensor codes = random_bytes({9, 21}, DType::kU8, width == 4 ? 15 : 255);
    const Tensor words = Tensor::empty({9, width == 4 ? 3 : 6}, DType::kI32);
    const Tensor back = Tensor::zeros({9, 21}, DType::kU8);
    pack_codes(codes, words, width, order);
    unpack_codes(words, back, width, order);
    EXPECT_TRUE(same(codes, back));
  }
  // GPTQ: (in / 8, out) words hold 8 inputs of one output.
  const Tensor codes = random_bytes({16, 3}, DType::kU8, 15);  // (in, out)
  const Tensor qweight = Tensor::empty({2, 3}, DType::kI32);
  pack_codes(codes.transpose(0, 1), qweight.transpose(0, 1));
  EXPECT_EQ(qweight.as<std::uint32_t>()[3 + 2] >> 4 & 15, codes.as<std::uint8_t>()[9 * 3 + 2]);
}

TEST(ScaleLayoutTest, WrongShapesAreRefused) {
  const Tensor flat = Tensor::zeros({5, 6}, DType::kU8), f32 = Tensor::zeros({5, 6}, DType::kF32);
  EXPECT_THROW(tile_scales(flat, Tensor::zeros({1, 1, 32, 4, 4}, DType::kU8)), Error);
  EXPECT_THROW(tile_scales(f32, Tensor::zeros({1, 2, 32, 4, 4}, DType::kF32)), Error);
  EXPECT_THROW(pack_codes(flat, Tensor::zeros({5, 2}, DType::kI32)), Error);
  EXPECT_THROW(pack_codes(flat, Tensor::zeros({5, 2}, DType::kI32), 8, CodeOrder::kAwq), Error);
}

}  // namespace fusedmoe::scale_layout_test
