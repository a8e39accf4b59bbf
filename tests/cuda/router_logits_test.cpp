// Router logits on the device against those of the CPU, and their independence of the batch.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "../unit/router_cases.h"
#include "cuda/router/router.h"
#include "cuda_test.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"
#include "testing/cases.h"

namespace fusedmoe {
namespace {

using testing::normal_tensor;
using testing::to_gpu;
using testing::to_host;

const Stream kStream{testing::kGpu};

Tensor run(const RouterWeights& weights, const Tensor& x) {
  const Tensor host = Tensor::empty({x.size(0), weights.weight.size(0)}, DType::kF32);
  testing::poison(host);
  const Tensor logits = to_gpu(host), weight = to_gpu(weights.weight), rows = to_gpu(x);
  const Tensor bias = weights.bias ? to_gpu(weights.bias) : Tensor();
  cuda::router_logits(weight, bias, rows, logits, kStream);
  return to_host(logits);
}

// Tensor cores cut off what an addition of 16 products does not fit into fp32: up to 2^-23 of a sum
// of about sqrt(hidden), hidden / 16 times; the last sums and the bias round some more. The CPU's
// own error is smaller. A product of two numbers that is left out is of order 1.
void expect_near_cpu(const RouterWeights& weights, const Tensor& x) {
  const Tensor actual = run(weights, x);
  const Tensor expected = Tensor::empty(actual.shape(), DType::kF32);
  router_logits(weights, x, expected);
  const auto hidden = static_cast<double>(x.size(1));
  const double bound = 0x1p-23 * (hidden / 16 + 16) * (std::sqrt(hidden) + 8);
  for (std::int64_t i = 0; i < actual.numel(); ++i) {
    ASSERT_NEAR(actual.as<float>()[i], expected.as<float>()[i], bound)
        << "token " << i / actual.size(1) << " expert " << i % actual.size(1);
  }
}

std::string describe(std::int64_t tokens, std::int64_t experts, std::int64_t hidden) {
  return std::to_string(tokens) + " x " + std::to_string(experts) + " x " + std::to_string(hidden);
}

using CudaRouterLogitsTest = testing::CudaTest;

TEST_F(CudaRouterLogitsTest, EveryShape) {
  for (std::int64_t hidden : {1, 7, 8, 31, 32, 33, 40, 255, 256, 257, 360, 2880}) {
    for (std::int64_t experts : {1, 7, 8, 9, 33, 130}) {
      for (std::int64_t tokens : {1, 2, 15, 16, 17, 33, 257}) {
        if (hidden > 360 && tokens > 17) continue;
        SCOPED_TRACE(describe(tokens, experts, hidden));
        const RouterWeights weights{normal_tensor({experts, hidden}, DType::kBF16, 1),
                                    normal_tensor({experts}, DType::kF32, 2),
                                    {}};
        expect_near_cpu(weights, normal_tensor({tokens, hidden}, DType::kBF16, 3));
      }
    }
  }
}

TEST_F(CudaRouterLogitsTest, EveryPairOfDtypesInEveryTile) {
  for (DType weight : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (DType x : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (std::int64_t hidden : {300, 320}) {
        for (std::int64_t tokens : {6, 700}) {
          SCOPED_TRACE(std::string(name(weight)) + " x " + std::string(name(x)) + " " +
                       describe(tokens, 67, hidden));
          const RouterWeights with_bias{
              normal_tensor({67, hidden}, weight, 4), normal_tensor({67}, weight, 5), {}};
          expect_near_cpu(with_bias, normal_tensor({tokens, hidden}, x, 6));
          const RouterWeights without{normal_tensor({67, hidden}, weight, 4), {}, {}};
          expect_near_cpu(without, normal_tensor({tokens, hidden}, x, 6));
        }
      }
    }
  }
}

// A product of two numbers of 24 bits, of which the tensor cores take 8 at a time, arrives whole.
TEST_F(CudaRouterLogitsTest, NoDigitOfAnOperandIsLost) {
  for (DType dtype : {DType::kF32, DType::kF16}) {
    const Tensor numbers = normal_tensor({500, 1}, dtype, 7);
    const Tensor one = Tensor::empty({1, 1}, dtype);
    store_f32(one.data(), dtype, 0, 1);
    for (const auto& [weight, x] : {std::pair(numbers, one), std::pair(one, numbers)}) {
      const Tensor logits = run({weight, {}, {}}, x);
      for (std::int64_t i = 0; i < 500; ++i) {
        ASSERT_EQ(logits.as<float>()[i], load_f32(numbers.data(), dtype, i));
      }
    }
  }
}

TEST_F(CudaRouterLogitsTest, ATokensLogitsDoNotDependOnItsBatch) {
  constexpr std::int64_t kExperts = 130, kTokens = 4096;
  for (std::int64_t hidden : {723, 736}) {
    for (DType dtype : {DType::kBF16, DType::kF32}) {
      const RouterWeights weights{normal_tensor({kExperts, hidden}, DType::kBF16, 8),
                                  normal_tensor({kExperts}, DType::kBF16, 9),
                                  {}};
      const Tensor x = normal_tensor({kTokens, hidden}, dtype, 10);
      const Tensor all = run(weights, x);
      for (std::int64_t tokens : {1, 3, 40, 1000}) {
        for (std::int64_t first : {0, 5, 2049}) {
          SCOPED_TRACE(describe(tokens, kExperts, hidden));
          const Tensor some = run(weights, {x.slice(0, first, first + tokens), x.owner()});
          EXPECT_EQ(0, std::memcmp(some.data(), all.as<float>() + first * kExperts,
                                   static_cast<std::size_t>(some.nbytes())));
        }
      }
    }
  }
}

TEST_F(CudaRouterLogitsTest, ANanTokenLeavesItsNeighboursAlone) {
  testing::expect_nan_stays_in_its_token(run);
}

// Kernels that start before their predecessors end still see all that those wrote.
TEST_F(CudaRouterLogitsTest, RoutingFollowsOnTheSameStream) {
  const std::int64_t experts = 128, topk = 8, hidden = 2880;
  RouterConfig config;
  config.num_experts = experts;
  config.topk = topk;
  config.scoring = ScoringFunc::kTopkSoftmax;
  const Tensor weight = to_gpu(normal_tensor({experts, hidden}, DType::kBF16, 13));
  for (std::int64_t tokens : {1, 5, 40, 3000}) {
    std::vector<Tensor> rows, ids, counts;
    const Tensor logits = to_gpu(Tensor::zeros({tokens, experts}, DType::kF32));
    const Tensor topk_weights = to_gpu(Tensor::zeros({tokens, topk}, DType::kF32));
    for (std::uint64_t i = 0; i < 8; ++i) {
      rows.push_back(normal_tensor({tokens, hidden}, DType::kBF16, 14 + i));
      rows.push_back(to_gpu(rows.back()));
      ids.push_back(to_gpu(Tensor::zeros({tokens, topk}, DType::kI32)));
      counts.push_back(to_gpu(Tensor::zeros({experts}, DType::kI32)));
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
      cuda::router_logits(weight, {}, rows[2 * i + 1], logits, kStream);
      cuda::route(config, logits, {}, {ids[i], topk_weights}, counts[i], kStream);
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const Tensor expected_logits = run({to_host(weight), {}, {}}, rows[2 * i]);
      const Tensor expected = Tensor::empty({tokens, topk}, DType::kI32);
      route(config, expected_logits, {}, {expected, Tensor::empty({tokens, topk}, DType::kF32)});
      const Tensor actual = to_host(ids[i]), histogram = to_host(counts[i]);
      ASSERT_EQ(0, std::memcmp(actual.data(), expected.data(),
                               static_cast<std::size_t>(expected.nbytes())))
          << "tokens " << tokens << " round " << i;
      std::vector<std::int32_t> left(histogram.as<std::int32_t>(),
                                     histogram.as<std::int32_t>() + experts);
      for (std::int64_t f = 0; f < expected.numel(); ++f) --left[expected.as<std::int32_t>()[f]];
      ASSERT_EQ(left, std::vector<std::int32_t>(experts, 0));
    }
  }
}

// Rows with gaps between them, which are not read: they hold NaN.
TEST_F(CudaRouterLogitsTest, RowStride) {
  for (const std::int64_t padding : {1, 8}) {  // with 1, 16-byte loads do not fit
    for (const std::int64_t tokens : {1, 9, 100, 2000}) {
      const RouterWeights weights{normal_tensor({64, 96}, DType::kBF16, 40), {}, {}};
      const Tensor x = normal_tensor({tokens, 96}, DType::kBF16, 41);
      const Tensor wide = Tensor::empty({tokens, 96 + padding}, DType::kBF16);
      testing::poison(wide);
      for (std::int64_t t = 0; t < tokens; ++t) {
        std::memcpy(wide.as<std::uint16_t>() + t * (96 + padding),
                    x.as<const std::uint16_t>() + t * 96, 96 * sizeof(std::uint16_t));
      }
      const Tensor expected = run(weights, x),
                   logits = to_gpu(Tensor::zeros({tokens, 64}, DType::kF32));
      const Tensor memory = to_gpu(wide), weight = to_gpu(weights.weight);
      cuda::router_logits(weight, {}, memory.slice(1, 0, 96), logits, kStream);
      EXPECT_TRUE(testing::bitwise_equal(to_host(logits), expected)) << tokens << ' ' << padding;
    }
  }
}

TEST_F(CudaRouterLogitsTest, NoTokensIsLegal) {
  const RouterWeights weights{Tensor::zeros({4, 8}, DType::kF32), {}, {}};
  EXPECT_EQ(run(weights, Tensor::empty({0, 8}, DType::kF32)).numel(), 0);
}

// Needs no device: nothing is launched, and nothing reads the memory.
TEST(CudaRouterLogitsArgumentsTest, AreNamed) {
  std::vector<float> memory(256);
  const auto view = [&](DType dtype, const Shape& shape, int offset = 0) {
    return TensorView(memory.data() + offset, dtype, shape, testing::kGpu);
  };
  const TensorView weight = view(DType::kBF16, {4, 8}), x = view(DType::kF32, {3, 8}, 32),
                   logits = view(DType::kF32, {3, 4}, 64);
  const auto fault = [&](const TensorView& w, const TensorView& bias, const TensorView& in,
                         const TensorView& out) -> std::string {
    try {
      cuda::router_logits(w, bias, in, out, kStream);
    } catch (const Error& error) {
      return error.argument();
    }
    return "";
  };
  EXPECT_EQ(fault({}, {}, x, logits), "router.weight");
  EXPECT_EQ(fault(view(DType::kI32, {4, 8}), {}, x, logits), "router.weight");
  EXPECT_EQ(fault(TensorView(memory.data(), DType::kF32, {4, 8}), {}, x, logits), "router.weight");
  EXPECT_EQ(fault(weight, view(DType::kF32, {5}), x, logits), "router.bias");
  EXPECT_EQ(fault(weight, {}, view(DType::kF32, {3, 7}, 32), logits), "hidden_states");
  EXPECT_EQ(fault(weight, {}, x.slice(1, 0, 8, 2), logits), "hidden_states");
  EXPECT_EQ(fault(weight, {}, x, view(DType::kF32, {3, 5}, 64)), "router_logits");
  EXPECT_EQ(fault(weight, {}, x, view(DType::kF32, {3, 4}, 32)), "router_logits");
}

}  // namespace
}  // namespace fusedmoe
