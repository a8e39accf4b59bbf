// Which schemes have a format of packed weights for CUDA, and what its kernels do with their
// scales.
#include "cuda/formats/weight_formats.h"

#include <gtest/gtest.h>

#include "cuda/sm90/kernel_set.h"
#include "fusedmoe/error.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::cuda::weight_format_test {

TEST(WeightFormatTest, RowsWithScalesOfKBlocksNeedAKernelForThem) {
  for (const QuantKey& rows : {keys::e4m3_group(), keys::e4m3_group(true)}) {
    EXPECT_TRUE(find_weight_format({keys::e4m3_row(), rows}, DType::kBF16));
    EXPECT_FALSE(find_weight_format({keys::int4_e4m3(), rows}, DType::kBF16));
    EXPECT_FALSE(find_weight_format({keys::mxfp4(), rows}, DType::kBF16));
  }
}

TEST(WeightFormatTest, Fp8WithoutScalesOfKBlocksHasTheRowPass) {
  const auto format_of = [](const QuantKey& weights, const QuantKey& rows) {
    const WeightFormat* format = find_weight_format({weights, rows}, DType::kBF16);
    if (!format) throw Error("scheme", "none", "one that has a format");
    return *format;
  };
  const TileShape& few = sm90::kTilesFp8[1];
  ASSERT_TRUE(few.has_epilogue_warpgroup());
  for (const QuantKey& weights : {keys::e4m3_tensor(), keys::e4m3_row()}) {
    for (const QuantKey& rows :
         {keys::e4m3_tensor(), keys::e4m3_tensor(true), keys::e4m3_row(true)}) {
      EXPECT_FALSE(format_of(weights, rows).k_scales);
      EXPECT_TRUE(sm90::kernel_set(format_of(weights, rows)).has_row_pass(few));
      EXPECT_TRUE(sm90::kernel_set(format_of(weights, rows)).has_row_pass(sm90::kTilesFp8Rows[2]));
      EXPECT_FALSE(sm90::kernel_set(format_of(weights, rows)).has_row_pass(sm90::kTilesFp8Rows[3]));
    }
    EXPECT_TRUE(format_of(weights, keys::e4m3_group()).k_scales);
  }
  const WeightFormat block = format_of(keys::e4m3_block(), keys::e4m3_group());
  EXPECT_TRUE(block.k_scales);
  EXPECT_FALSE(sm90::kernel_set(block).has_row_pass(few));
}

}  // namespace fusedmoe::cuda::weight_format_test
