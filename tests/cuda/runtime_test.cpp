// Memory, copies, streams, events and graphs on the GPU.
#include "fusedmoe/runtime.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>

#include "core/device_runtime.h"
#include "cuda_test.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace fusedmoe {
namespace {

using testing::bitwise_equal;
using testing::kGpu;
using testing::Random;
using testing::to_gpu;
using testing::to_host;

using RuntimeTest = testing::CudaTest;

constexpr std::int64_t kLarge = std::int64_t{64} << 20;

Tensor random_bytes(std::int64_t count, std::uint64_t seed) {
  Random random(seed);
  Tensor tensor = Tensor::empty({count}, DType::kU8);
  for (std::int64_t i = 0; i < count; ++i) {
    tensor.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(random.below(256));
  }
  return tensor;
}

/// Host tensor of equal bytes.
Tensor equal_bytes(std::int64_t count, std::uint8_t value) {
  Tensor tensor = Tensor::empty({count}, DType::kU8);
  fill_bytes(tensor, value, {});
  return tensor;
}

TEST_F(RuntimeTest, DeviceMemoryIsAlignedAndKnowsItsDevice) {
  for (const std::int64_t count : {0, 1, 3, 1000001}) {
    const Tensor tensor = Tensor::empty({count}, DType::kU8, kGpu);
    EXPECT_EQ(tensor.device(), kGpu);
    ASSERT_NE(tensor.data(), nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data()) % 256, 0u);
  }
}

TEST_F(RuntimeTest, BytesTravelUnchanged) {
  for (const std::int64_t count : {0, 1, 13, 4096, 5000001}) {
    const Tensor source = random_bytes(count, 1);
    const Tensor there = to_gpu(source);
    const Tensor other = Tensor::empty({count}, DType::kU8, kGpu);
    copy(there, other, Stream{kGpu});
    EXPECT_TRUE(bitwise_equal(to_host(other), source)) << count;
    EXPECT_EQ(to_gpu(there).data(), there.data()) << "already there";
  }
}

TEST_F(RuntimeTest, ZerosAreZeroAndFillsFill) {
  const Tensor zeros = Tensor::zeros({777}, DType::kF32, kGpu);
  EXPECT_TRUE(bitwise_equal(to_host(zeros), Tensor::zeros({777}, DType::kF32)));
  const Tensor filled = Tensor::empty({777}, DType::kU8, kGpu);
  fill_bytes(filled, 0x5a, Stream{kGpu});
  EXPECT_TRUE(bitwise_equal(to_host(filled), equal_bytes(777, 0x5a)));
}

TEST_F(RuntimeTest, AnEventOrdersTwoStreams) {
  const OwnedStream first(kGpu), second(kGpu);
  const Tensor source = Tensor::zeros({kLarge}, DType::kU8, kGpu);
  const Tensor target = Tensor::zeros({kLarge}, DType::kU8, kGpu);
  Event filled(kGpu);
  for (int value = 1; value <= 20; ++value) {
    fill_bytes(source, static_cast<std::uint8_t>(value), first);
  }
  filled.record(first);
  filled.wait(second);
  copy(source, target, second);
  synchronize(second);
  EXPECT_TRUE(bitwise_equal(to_host(target), equal_bytes(kLarge, 20)));
}

TEST_F(RuntimeTest, EventsMeasureTime) {
  const OwnedStream stream(kGpu);
  const Tensor memory = Tensor::empty({kLarge}, DType::kU8, kGpu);
  Event start(kGpu), end(kGpu);
  EXPECT_THROW(elapsed_ms(start, end), Error) << "never recorded";
  start.record(stream);
  for (int i = 0; i < 50; ++i) fill_bytes(memory, 1, stream);
  end.record(stream);
  // 50 x 64 MiB: no memory of today takes less than 50 us for them, nor a second.
  const double elapsed = elapsed_ms(start, end);
  EXPECT_GT(elapsed, 0.05);
  EXPECT_LT(elapsed, 1000);
}

TEST_F(RuntimeTest, AGraphRunsWhenLaunchedAndReadsWhatIsThereThen) {
  const OwnedStream stream(kGpu);
  const Tensor source = to_gpu(random_bytes(4099, 3));
  const Tensor target = Tensor::zeros({4099}, DType::kU8, kGpu);
  const Graph graph(stream, [&] { copy(source, target, stream); });
  synchronize(stream);
  EXPECT_TRUE(bitwise_equal(to_host(target), Tensor::zeros({4099}, DType::kU8)))
      << "capturing must run nothing";
  for (std::uint64_t seed = 4; seed < 7; ++seed) {
    const Tensor now = random_bytes(4099, seed);
    copy(now, source, stream);
    graph.launch(stream);
    synchronize(stream);
    EXPECT_TRUE(bitwise_equal(to_host(target), now));
  }
}

TEST_F(RuntimeTest, AFailedCaptureLeavesTheStreamUsable) {
  const OwnedStream stream(kGpu);
  const Tensor memory = Tensor::zeros({64}, DType::kU8, kGpu);
  EXPECT_THROW(Graph(stream,
                     [&] {
                       fill_bytes(memory, 1, stream);
                       throw std::logic_error("work failed");
                     }),
               std::logic_error);
  EXPECT_THROW(Graph(stream, [&] { Tensor::empty({64}, DType::kU8, kGpu); }), Error)
      << "allocating while capturing";
  fill_bytes(memory, 2, stream);
  synchronize(stream);
  EXPECT_TRUE(bitwise_equal(to_host(memory), equal_bytes(64, 2)));
}

TEST_F(RuntimeTest, WhatDoesNotFitIsAnError) {
  const Tensor host = Tensor::zeros({8}, DType::kU8);
  const Tensor gpu = Tensor::zeros({8}, DType::kU8, kGpu);
  EXPECT_THROW(copy(host, gpu, {}), Error) << "a stream of the cpu";
  EXPECT_THROW(copy(host, gpu.slice(0, 0, 7), Stream{kGpu}), Error) << "another shape";
  EXPECT_THROW(copy(host.slice(0, 0, 8, 2), gpu.slice(0, 0, 4), Stream{kGpu}), Error) << "strided";
  EXPECT_THROW(fill_bytes(gpu, 0, {}), Error);
  EXPECT_THROW(Graph(Stream{kGpu}, [] {}), Error) << "the default stream";
  EXPECT_THROW(Tensor::empty({8}, DType::kU8, {DeviceKind::kCuda, 999}), Error);
  EXPECT_NE(device_problem({DeviceKind::kCuda, 999}).find("counted from 0"), std::string::npos);
}

/// So work beside it, which has the same priority or a higher one, goes on.
TEST_F(RuntimeTest, AStreamHasTheLowestPriority) {
  const OwnedStream stream(kGpu);
  int lowest = 0, priority = -1;
  ASSERT_EQ(cudaDeviceGetStreamPriorityRange(&lowest, nullptr), cudaSuccess);
  ASSERT_EQ(cudaStreamGetPriority(static_cast<cudaStream_t>(Stream(stream).handle), &priority),
            cudaSuccess);
  EXPECT_EQ(priority, lowest);
}

/// While the device fills 256 GiB, which takes some 60 ms.
TEST_F(RuntimeTest, PagesAreTakenAndFreedWithoutAWaitForTheDevice) {
  constexpr int kFills = 4096;
  const core::DeviceRuntime& runtime = core::runtime_of(kGpu);
  const Tensor filled = Tensor::empty({kLarge}, DType::kU8, kGpu),
               copied = Tensor::empty({64}, DType::kU8);
  const OwnedStream stream(kGpu), beside(kGpu);
  for (int i = 0; i < kFills; ++i) fill_bytes(filled, 1, stream);
  {
    const auto pages = runtime.allocate_pages(kLarge, kGpu);
    fill_bytes(borrow(pages.get(), DType::kU8, {kLarge}, kGpu), 7, beside);
    copy(borrow(pages.get(), DType::kU8, {64}, kGpu), copied, beside);
    synchronize(beside);
  }
  EXPECT_EQ(cudaStreamQuery(static_cast<cudaStream_t>(Stream(stream).handle)), cudaErrorNotReady);
  synchronize(stream);
  EXPECT_TRUE(bitwise_equal(copied, equal_bytes(64, 7)));
}

}  // namespace
}  // namespace fusedmoe
