// The bit matrix on the device against the one on the CPU.
#include "cuda/router/bitmatrix.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "cuda_test.h"
#include "fusedmoe/router.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace fusedmoe {
namespace {

const Stream kStream{testing::kGpu};

void expect_cpu_result(const Tensor& ids, const Tensor& map, std::int64_t num_local_experts) {
  const Tensor expected = Tensor::empty({ids.size(0), (num_local_experts + 31) / 32}, DType::kI32);
  testing::poison(expected);
  const Tensor actual = testing::to_gpu(expected), device_ids = testing::to_gpu(ids);
  const Tensor device_map = map ? testing::to_gpu(map) : Tensor();
  build_bitmatrix(ids, map, num_local_experts, expected);
  cuda::build_bitmatrix(device_ids, device_map, num_local_experts, actual, kStream);
  EXPECT_EQ(0, std::memcmp(testing::to_host(actual).data(), expected.data(),
                           static_cast<std::size_t>(expected.nbytes())));
}

using CudaBitmatrixTest = testing::CudaTest;

TEST_F(CudaBitmatrixTest, IsThatOfTheCpu) {
  testing::Random random(1);
  for (std::int64_t experts : {1, 31, 32, 33, 128, 257}) {
    // Local ids run backwards, every third expert is elsewhere.
    const Tensor map = Tensor::empty({experts}, DType::kI32);
    for (std::int64_t e = 0; e < experts; ++e) {
      map.as<std::int32_t>()[e] = e % 3 == 2 ? -1 : static_cast<std::int32_t>(experts - 1 - e);
    }
    for (std::int64_t tokens : {0, 1, 7, 1000}) {
      for (std::int64_t topk : {1, 8}) {
        SCOPED_TRACE(std::to_string(experts) + " experts, " + std::to_string(tokens) + " tokens");
        // Also -1, duplicates, and ids that are out of range.
        const Tensor ids = Tensor::empty({tokens, topk}, DType::kI32);
        for (std::int64_t i = 0; i < ids.numel(); ++i) {
          ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(random.below(experts + 4) - 2);
        }
        expect_cpu_result(ids, {}, experts);
        expect_cpu_result(ids, map, experts);
        expect_cpu_result(ids, map, (experts + 1) / 2);
      }
    }
  }
}

// Needs no device: nothing is launched, and nothing reads the memory.
TEST(CudaBitmatrixArgumentsTest, AreNamed) {
  std::int32_t memory[32];
  const auto view = [&](const Shape& shape, int offset = 0) {
    return TensorView(memory + offset, DType::kI32, shape, testing::kGpu);
  };
  const auto fault = [](const TensorView& ids, const TensorView& map, std::int64_t experts,
                        const TensorView& bits) -> std::string {
    try {
      cuda::build_bitmatrix(ids, map, experts, bits, kStream);
    } catch (const Error& error) {
      return error.argument();
    }
    return "";
  };
  EXPECT_EQ(fault({}, {}, 8, view({3, 1}, 16)), "topk_ids");
  EXPECT_EQ(fault(TensorView(memory, DType::kI32, {3, 2}), {}, 8, view({3, 1}, 16)), "topk_ids");
  EXPECT_EQ(fault(view({3, 2}), view({2, 2}, 8), 8, view({3, 1}, 16)), "expert_map");
  EXPECT_EQ(fault(view({3, 2}), {}, 0, view({3, 1}, 16)), "num_local_experts");
  EXPECT_EQ(fault(view({3, 2}), {}, 33, view({3, 1}, 16)), "bitmatrix");
  EXPECT_EQ(fault(view({3, 2}), {}, 8, view({3, 1}, 4)), "bitmatrix");
}

}  // namespace
}  // namespace fusedmoe
