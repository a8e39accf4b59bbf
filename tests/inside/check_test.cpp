// What the checks of arguments say about memory: overlap, and rows for kernels on CUDA.
#include "core/check.h"

#include <gtest/gtest.h>

#include "moe/check_args.h"

namespace fusedmoe::core::check_test {

constexpr std::int64_t kRows = 4, kColumns = 8;

TEST(OverlapTest, ColumnsSideBySideAreApart) {
  const Tensor both = Tensor::zeros({kRows, 2 * kColumns}, DType::kF32);
  const TensorView left = both.slice(1, 0, kColumns), right = both.slice(1, kColumns, 2 * kColumns);
  EXPECT_FALSE(overlap(left, right));
  EXPECT_FALSE(overlap(right, left));
  EXPECT_FALSE(overlap(left.slice(0, 1, 3), right.slice(0, 0, 4)));
  EXPECT_TRUE(overlap(left, both.slice(1, kColumns - 1, kColumns + 1)));
  EXPECT_TRUE(overlap(both.slice(1, kColumns - 1, kColumns + 1), right));
  EXPECT_TRUE(overlap(left, left));
}

TEST(OverlapTest, TheLastRowCounts) {
  const Tensor all = Tensor::zeros({kRows, 2 * kColumns}, DType::kF32);
  const TensorView left = all.slice(1, 0, kColumns);
  float* last = all.as<float>() + (kRows - 1) * 2 * kColumns;
  EXPECT_TRUE(overlap(left, TensorView(last, DType::kF32, {kColumns})));
  EXPECT_FALSE(overlap(left, TensorView(last + kColumns, DType::kF32, {kColumns})));
  EXPECT_FALSE(overlap(left, TensorView(last, DType::kF32, {0})));
}

TEST(CheckPlaceTest, RowsOnCudaStartAtWholeVectors) {
  alignas(16) static std::byte memory[4096];
  const Device cuda{DeviceKind::kCuda, 0};
  const auto check = [&](std::size_t offset, DType dtype, std::int64_t stride, Device device) {
    const TensorView whole(memory + offset, dtype, {kRows, stride}, device);
    check_place(whole.slice(1, 0, kColumns), "rows", device, true);
  };
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const std::int64_t vector = dtype == DType::kF32 ? 4 : 8;
    EXPECT_NO_THROW(check(0, dtype, kColumns, cuda));
    EXPECT_NO_THROW(check(16, dtype, kColumns + vector, cuda));
    EXPECT_THROW(check(4, dtype, kColumns, cuda), Error);
    EXPECT_THROW(check(0, dtype, kColumns + 1, cuda), Error);
    EXPECT_NO_THROW(check(4, dtype, kColumns + 1, {}));
  }
}

}  // namespace fusedmoe::core::check_test
