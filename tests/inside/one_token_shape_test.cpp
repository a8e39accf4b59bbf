// How the kernel of one token cuts its work and its shared memory, on the host: no GPU is needed.
#include <gtest/gtest.h>

#include <cstdint>

#include "cuda/one_token/one_token.h"

namespace fusedmoe::cuda::one_token_shape_test {

TEST(OneTokenTest, SharedMemoryHasRoomForAllThatABlockKeeps) {
  OneTokenShape shape;
  shape.slots = 8;
  shape.blocks = 132;
  shape.slices[0] = slices_of(768, true);
  shape.slices[1] = slices_of(2048, false);
  shape.block_k = 128;
  shape.k_blocks[0] = 16;
  shape.k_blocks[1] = 6;
  EXPECT_EQ(slices_of(768, true), 96);
  EXPECT_EQ(slices_of(2047, false), 128);
  EXPECT_EQ(shape.block_slices(0), 6);  // of 768
  EXPECT_EQ(shape.block_slices(1), 1);
  const OneTokenLayout layout = shape.layout();
  EXPECT_EQ(layout.words[1], 16 * 256) << "one row";
  EXPECT_EQ(layout.scales[0], layout.words[1] + 8 * 6 * 256) << "a row for each slot";
  EXPECT_EQ(layout.partials - layout.factors, 8 * 16 * 4) << "8 segments of GEMM 2";
  EXPECT_EQ(layout.bytes - layout.partials, 6 * 16 * 16 * 4);
  shape.rows_by_slot = true;
  EXPECT_EQ(shape.layout().words[1], 8 * 16 * 256);
  // As the kernel divides them, no block has more slices than there is room for.
  for (shape.blocks = 1; shape.blocks <= 200; ++shape.blocks) {
    for (const int gemm : {0, 1}) {
      const std::int64_t all = shape.slices[gemm] * (gemm == 0 ? shape.slots : 1);
      for (std::int64_t block = 0; block < shape.blocks; ++block) {
        const std::int64_t first = all * block / shape.blocks;
        ASSERT_LE(all * (block + 1) / shape.blocks - first, shape.block_slices(gemm));
      }
    }
  }
}

TEST(OneTokenTest, TheNthSetBitIsFound) {
  for (const unsigned mask : {0U, 1U, 0x80000000U, 0xFFFFFFFFU, 0x7FFFFFFFU, 0xAAAAAAAAU,
                              0x00010001U, 0xFFFF0000U, 0x0000FFFFU, 0xDEADBEEFU}) {
    int n = 0;
    for (int bit = 0; bit < 32; ++bit) {
      if ((mask >> bit & 1) == 0) continue;
      ASSERT_EQ(nth_set_bit(mask, n++), bit) << mask;
    }
    for (; n < 32; ++n) ASSERT_EQ(nth_set_bit(mask, n), 31) << mask << " has not so many";
  }
}

}  // namespace fusedmoe::cuda::one_token_shape_test
