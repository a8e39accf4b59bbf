// Views to and from DLTensor, with the installed <dlpack/dlpack.h>.
#include "fusedmoe/dlpack.h"

#include <dlpack/dlpack.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace fusedmoe::dlpack_test {

TEST(DlpackTest, ViewCrossesBothWaysUnchanged) {
  std::vector<float> memory(24);
  const TensorView view =
      TensorView(memory.data(), DType::kF32, {2, 3, 4}).transpose(0, 1).slice(2, 1, 4, 2);
  DLTensor tensor{};
  to_dlpack(view, tensor);
  EXPECT_EQ(tensor.device.device_type, kDLCPU);
  EXPECT_EQ(tensor.dtype.code, kDLFloat);
  EXPECT_EQ(tensor.dtype.bits, 32);
  EXPECT_EQ(tensor.dtype.lanes, 1);
  EXPECT_EQ(tensor.ndim, 3);

  const TensorView back = from_dlpack(tensor);
  EXPECT_EQ(back.data(), view.data());
  EXPECT_EQ(back.dtype(), view.dtype());
  EXPECT_EQ(back.shape(), view.shape());
  EXPECT_EQ(back.strides(), view.strides());
  EXPECT_EQ(back.device(), view.device());
}

TEST(DlpackTest, EveryDtypeCrosses) {
  std::uint64_t memory[4] = {};
  for (int i = 0; i <= static_cast<int>(DType::kBool); ++i) {
    const TensorView view(memory, static_cast<DType>(i), {4});
    DLTensor tensor{};
    to_dlpack(view, tensor);
    EXPECT_EQ(from_dlpack(tensor).dtype(), view.dtype()) << name(view.dtype());
  }
}

TEST(DlpackTest, CudaDeviceKeepsItsIndex) {
  float memory[2];
  DLTensor tensor{};
  const TensorView view(memory, DType::kF32, {2}, {DeviceKind::kCuda, 3});
  to_dlpack(view, tensor);
  EXPECT_EQ(tensor.device.device_type, kDLCUDA);
  EXPECT_EQ(tensor.device.device_id, 3);
  EXPECT_EQ(from_dlpack(tensor).device(), view.device());
}

TEST(DlpackTest, MissingStridesMeanContiguousAndTheByteOffsetCounts) {
  float memory[8] = {};
  std::int64_t shape[] = {2, 3};
  DLTensor tensor{};
  tensor.data = memory;
  tensor.ndim = 2;
  tensor.dtype = {kDLFloat, 32, 1};
  tensor.device = {kDLCPU, 0};
  tensor.shape = shape;
  tensor.byte_offset = 8;
  const TensorView view = from_dlpack(tensor);
  EXPECT_EQ(view.strides(), Shape({3, 1}));
  EXPECT_EQ(view.as<float>(), memory + 2);
}

TEST(DlpackTest, RefusesWhatTheLibraryDoesNotHave) {
  float memory[8] = {};
  std::int64_t shape[] = {1, 1, 1, 1, 1, 1, 1};
  DLTensor good{};
  good.data = memory;
  good.ndim = 2;
  good.dtype = {kDLFloat, 32, 1};
  good.device = {kDLCPU, 0};
  good.shape = shape;
  EXPECT_NO_THROW(from_dlpack(good));

  DLTensor bad = good;
  bad.dtype = {kDLComplex, 64, 1};
  EXPECT_THROW(from_dlpack(bad), Error);
  bad = good;
  bad.dtype.lanes = 4;
  EXPECT_THROW(from_dlpack(bad), Error);
  bad = good;
  bad.device.device_type = kDLROCM;
  EXPECT_THROW(from_dlpack(bad), Error);
  bad = good;
  bad.ndim = 7;
  EXPECT_THROW(from_dlpack(bad), Error);
  bad = good;
  std::int64_t huge[] = {0, std::int64_t{1} << 62, 4};
  bad.ndim = 3;
  bad.shape = huge;
  EXPECT_THROW(from_dlpack(bad), Error);
  bad = good;
  bad.data = nullptr;
  EXPECT_THROW(from_dlpack(bad), Error);
}

}  // namespace fusedmoe::dlpack_test
