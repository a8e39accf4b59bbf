// Shape, TensorView, Tensor, DType and the checks of core/check.h.
#include "fusedmoe/tensor.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "core/check.h"

namespace fusedmoe::tensor_test {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();

TEST(DTypeTest, NamesParseBackAndWidthsFit) {
  for (int i = 0; i <= static_cast<int>(DType::kBool); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(name(dtype)), dtype) << name(dtype);
    EXPECT_EQ(dtype_from_dlpack(dlpack_type(dtype)), dtype) << name(dtype);
    EXPECT_EQ(dlpack_type(dtype).bits, bits(dtype)) << name(dtype);
  }
  EXPECT_EQ(parse_dtype("bfloat16"), DType::kBF16);
  EXPECT_FALSE(parse_dtype("fp8"));
}

TEST(DTypeTest, PackedTypesRoundUpToWholeBytes) {
  EXPECT_EQ(bytes(DType::kE2M1, 0), 0);
  EXPECT_EQ(bytes(DType::kE2M1, 3), 2);
  EXPECT_EQ(bytes(DType::kI4, 4), 2);
  EXPECT_EQ(bytes(DType::kBF16, 3), 6);
  EXPECT_EQ(bytes(DType::kF64, std::int64_t{1} << 33), std::int64_t{1} << 36);
}

TEST(ShapeTest, CountsElementsAndRefusesWhatDoesNotFit) {
  EXPECT_EQ(Shape({2, 3, 4}).numel(), 24);
  EXPECT_EQ(Shape().numel(), 1);
  EXPECT_EQ(Shape({7, 0, 5}).numel(), 0);
  EXPECT_EQ(Shape({56000 * 8, 7168}).numel(), 3211264000);
  EXPECT_THROW(Shape({2, -1}).numel(), Error);
  EXPECT_THROW(Shape({kHuge, 2}).numel(), Error);
  EXPECT_THROW(Shape({1, 1, 1, 1, 1, 1, 1}), Error);
  EXPECT_EQ(to_string(Shape({2, 3})), "[2, 3]");
  EXPECT_FALSE(Shape({2, 3}) == Shape({2, 3, 1}));
}

TEST(TensorViewTest, DefaultStandsForNotGiven) {
  const TensorView view;
  EXPECT_FALSE(view.defined());
  EXPECT_FALSE(view);
  EXPECT_EQ(core::describe(view), "undefined");
}

TEST(TensorViewTest, ContiguousByDefault) {
  std::vector<float> memory(24);
  const TensorView view(memory.data(), DType::kF32, {2, 3, 4});
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(view.strides(), Shape({12, 4, 1}));
  EXPECT_EQ(view.nbytes(), 96);
}

TEST(TensorViewTest, SelectSliceAndTransposePointIntoTheSameMemory) {
  std::vector<float> memory(24);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i);
  const TensorView view(memory.data(), DType::kF32, {2, 3, 4});

  const TensorView row = view.select(0, 1).select(0, 2);
  EXPECT_EQ(row.shape(), Shape({4}));
  EXPECT_EQ(row.as<float>()[0], 20);

  const TensorView column = view.select(2, 1);
  EXPECT_EQ(column.shape(), Shape({2, 3}));
  EXPECT_FALSE(column.contiguous());
  EXPECT_EQ(column.as<float>()[column.stride(0) + 2 * column.stride(1)], 21);

  const TensorView odd = view.slice(2, 1, 4, 2);  // columns 1 and 3
  EXPECT_EQ(odd.shape(), Shape({2, 3, 2}));
  EXPECT_EQ(odd.as<float>()[odd.stride(2)], 3);

  const TensorView swapped = view.transpose(0, 2);
  EXPECT_EQ(swapped.shape(), Shape({4, 3, 2}));
  EXPECT_EQ(swapped.as<float>()[3 * swapped.stride(0) + swapped.stride(2)], 15);
}

TEST(TensorViewTest, ExtentOneNeverBreaksContiguity) {
  float memory[6];
  const TensorView view(memory, DType::kF32, {1, 6}, {1000, 1}, {});
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(view.reshape({2, 3}).strides(), Shape({3, 1}));
}

TEST(TensorViewTest, ExtentsAndStridesThatOverflowAreRefused) {
  float memory[6];
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  EXPECT_THROW(contiguous_strides({0, kHuge, 4}), Error);
  EXPECT_THROW(TensorView(memory, DType::kF32, {0, kHuge, 4}), Error);
  EXPECT_THROW(TensorView(memory, DType::kF32, {-1, 3}), Error);
  EXPECT_THROW(TensorView(memory, DType::kF32, {2, 3}, {kHuge, 1}, {}), Error);
  EXPECT_THROW(TensorView(memory, DType::kF32, {kHuge, 3}, {0, -kHuge}, {}), Error);
  EXPECT_THROW(bytes(DType::kF64, kHuge), Error);
  EXPECT_EQ(contiguous_strides({2, 0, 3}), Shape({3, 3, 1}));
  const TensorView view(memory, DType::kF32, {6});
  EXPECT_EQ(view.slice(0, 4, 5, kHuge).stride(0), 1);
  EXPECT_EQ(view.slice(0, 6, 6, kHuge).size(0), 0);
}

TEST(TensorViewTest, WithoutElementsIsContiguous) {
  EXPECT_TRUE(
      TensorView(static_cast<void*>(nullptr), DType::kF32, {0, 3}, {7, 5}, {}).contiguous());
}

TEST(TensorViewTest, PackedSliceMustBeginOnAByte) {
  std::uint8_t memory[8] = {};
  const TensorView view(memory, DType::kE2M1, {2, 8});
  EXPECT_EQ(view.nbytes(), 8);
  EXPECT_EQ(view.slice(1, 4, 8).as<std::uint8_t>(), memory + 2);
  EXPECT_EQ(view.select(0, 1).as<std::uint8_t>(), memory + 4);
  EXPECT_THROW(view.slice(1, 3, 8), Error);
}

TEST(TensorViewTest, RefusesWhatDoesNotFit) {
  float memory[6];
  const TensorView view(memory, DType::kF32, {2, 3});
  EXPECT_THROW(view.select(2, 0), Error);
  EXPECT_THROW(view.select(-1, 0), Error);
  EXPECT_THROW(view.select(0, 2), Error);
  EXPECT_THROW(view.select(0, -1), Error);
  EXPECT_THROW(view.slice(1, 2, 1), Error);
  EXPECT_THROW(view.slice(1, 0, 4), Error);
  EXPECT_THROW(view.slice(1, 0, 3, 0), Error);
  EXPECT_THROW(view.transpose(0, 2), Error);
  EXPECT_THROW(view.reshape({4}), Error);
  EXPECT_THROW(view.transpose(0, 1).reshape({6}), Error);
  EXPECT_THROW(TensorView(memory, DType::kF32, {2, 3}, {1}, {}), Error);
  EXPECT_THROW(TensorView(static_cast<void*>(nullptr), DType::kF32, {1}), Error);
  EXPECT_NO_THROW(TensorView(static_cast<void*>(nullptr), DType::kF32, {0, 4}));
}

TEST(TensorTest, EmptyIsAlignedAndLargeOnesToHugePages) {
  for (std::int64_t count : {0, 1, 63, 1000}) {
    const Tensor tensor = Tensor::empty({count}, DType::kE2M1);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data()) % 64, 0U) << count;
  }
  const Tensor large = Tensor::empty({3, 1 << 20}, DType::kF32);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large.data()) % (2 << 20), 0U);
}

TEST(TensorTest, ZerosAreZeroAndCopiesShareMemory) {
  const Tensor tensor = Tensor::zeros({5}, DType::kF32);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(tensor.as<float>()[i], 0);
  // NOLINTNEXTLINE(performance-unnecessary-copy-initialization): the copy is tested
  const Tensor copy = tensor;
  copy.as<float>()[2] = 3;
  EXPECT_EQ(tensor.as<float>()[2], 3);
}

TEST(TensorTest, KeepsItsOwnerAlive) {
  auto owner = std::make_shared<std::vector<float>>(4, 1.0F);
  const std::weak_ptr<std::vector<float>> watch = owner;
  Tensor tensor(TensorView(owner->data(), DType::kF32, {4}), owner);
  owner.reset();
  EXPECT_FALSE(watch.expired());
  tensor = Tensor();
  EXPECT_TRUE(watch.expired());
}

TEST(CheckTest, TensorOfAnotherKindIsNamed) {
  float memory[6];
  const TensorView view(memory, DType::kF32, {2, 3});
  EXPECT_NO_THROW(core::check_tensor(view, "x", DType::kF32, {-1, 3}));
  try {
    core::check_tensor(view, "x", DType::kF32, {-1, 4});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "x: was f32 [2, 3]; must be f32 [any, 4]");
  }
  EXPECT_THROW(core::check_tensor(view, "x", DType::kBF16, {2, 3}), Error);
  EXPECT_THROW(core::check_tensor(TensorView(), "x", DType::kF32, {2, 3}), Error);
  EXPECT_THROW(core::check_tensor(view.transpose(0, 1), "x", DType::kF32, {3, 2}), Error);
}

TEST(CheckTest, OverlapSeesSharedBytesOnly) {
  float memory[8];
  const TensorView front(memory, DType::kF32, {4});
  const TensorView back(memory + 4, DType::kF32, {4});
  const TensorView middle(memory + 3, DType::kF32, {2});
  EXPECT_FALSE(core::overlap(front, back));
  EXPECT_TRUE(core::overlap(front, middle));
  EXPECT_TRUE(core::overlap(middle, back));
  EXPECT_FALSE(core::overlap(TensorView(), back));
}

}  // namespace fusedmoe::tensor_test
