// The router on the device against the router on the CPU: every method, size and special value.
#include "cuda/router/router.h"
#include "../unit/router_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cuda_test.h"
#include "fusedmoe/error.h"
#include "fusedmoe/quant.h"
#include "testing/cases.h"

namespace fusedmoe {
namespace {

using testing::kScorings;
using testing::Random;
using testing::to_gpu;
using testing::to_host;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
const Stream kStream{testing::kGpu};

struct Routed {
  Tensor ids, weights, counts;
};

Routed make_outputs(std::int64_t num_tokens, const RouterConfig& config) {
  Routed routed{Tensor::empty({num_tokens, config.topk}, DType::kI32),
                Tensor::empty({num_tokens, config.topk}, DType::kF32),
                Tensor::empty({config.num_experts}, DType::kI32)};
  for (const Tensor& tensor : {routed.ids, routed.weights}) testing::poison(tensor);
  fill_bytes(routed.counts, 0, {});  // the histogram is added
  return routed;
}

Routed route_on_cpu(const RouterConfig& config, const Tensor& logits, const Tensor& bias) {
  Routed routed = make_outputs(logits.size(0), config);
  route(config, logits, bias, {routed.ids, routed.weights});
  auto* counts = routed.counts.as<std::int32_t>();
  std::fill(counts, counts + config.num_experts, 0);
  for (std::int64_t i = 0; i < routed.ids.numel(); ++i) ++counts[routed.ids.as<std::int32_t>()[i]];
  return routed;
}

Routed route_on_gpu(const RouterConfig& config, const Tensor& logits, const Tensor& bias,
                    bool with_counts = true) {
  const Routed host = make_outputs(logits.size(0), config);
  const Routed device{to_gpu(host.ids), to_gpu(host.weights), to_gpu(host.counts)};
  const Tensor device_logits = to_gpu(logits);
  const Tensor device_bias = bias ? to_gpu(bias) : Tensor();
  cuda::route(config, device_logits, device_bias, {device.ids, device.weights},
              with_counts ? TensorView(device.counts) : TensorView(), kStream);
  return {to_host(device.ids), to_host(device.weights), to_host(device.counts)};
}

// The same fp32 operations but for the last bit of exp and log1p: a few units in the last place,
// 6e-8 each.
void expect_same(const Routed& actual, const Routed& expected) {
  const std::int64_t topk = expected.ids.size(1);
  for (std::int64_t i = 0; i < expected.ids.numel(); ++i) {
    ASSERT_EQ(actual.ids.as<std::int32_t>()[i], expected.ids.as<std::int32_t>()[i])
        << "token " << i / topk << " slot " << i % topk;
    const float weight = expected.weights.as<float>()[i];
    if (std::isinf(weight)) {
      ASSERT_EQ(actual.weights.as<float>()[i], weight);
    } else {
      ASSERT_NEAR(actual.weights.as<float>()[i], weight,
                  1e-6 * std::abs(weight) + std::numeric_limits<float>::min())
          << "token " << i / topk << " slot " << i % topk;
    }
  }
  for (std::int64_t e = 0; e < expected.counts.numel(); ++e) {
    ASSERT_EQ(actual.counts.as<std::int32_t>()[e], expected.counts.as<std::int32_t>()[e])
        << "expert " << e;
  }
}

void expect_cpu_result(const RouterConfig& config, const Tensor& logits, const Tensor& bias) {
  expect_same(route_on_gpu(config, logits, bias), route_on_cpu(config, logits, bias));
}

/// (rows, columns) f32 of what draw() returns.
template <typename Draw>
Tensor filled(const Shape& shape, Draw draw) {
  Tensor tensor = Tensor::empty(shape, DType::kF32);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.as<float>()[i] = draw();
  return tensor;
}

Tensor random_logits(const Shape& shape, std::uint64_t seed) {
  Random random(seed);
  return filled(shape, [&] { return static_cast<float>(2 * random.normal()); });
}

/// Quarters from -3 to 3: most rows have ties.
Tensor tied_logits(const Shape& shape, std::uint64_t seed) {
  Random random(seed);
  return filled(shape, [&] { return static_cast<float>(random.below(25) - 12) / 4; });
}

/// Every special value, also where exp and sigmoid over- and underflow.
Tensor strange_logits(const Shape& shape, std::uint64_t seed) {
  constexpr std::array kStrange = {kNan,   -kNan,  kInf,     -kInf,   0.0F,   -0.0F,  3.4e38F,
                                   1.0F,   -1.0F,  -3.4e38F, 1e-45F,  50.0F,  -50.0F, 88.5F,
                                   -88.5F, 103.9F, -103.9F,  -150.0F, 150.0F, 17.0F,  -17.0F};
  Random random(seed);
  return filled(shape, [&] {
    // Few enough that rows of finite numbers exist, too.
    return random.below(8) == 0 ? kStrange[random.below(kStrange.size())]
                                : static_cast<float>(random.normal());
  });
}

RouterConfig make_config(std::int64_t num_experts, std::int64_t topk, ScoringFunc scoring,
                         bool renormalize = false) {
  RouterConfig config = testing::make_router(num_experts, topk, scoring, renormalize);
  config.routed_scaling_factor = renormalize ? 2.5F : 1.0F;
  return config;
}

std::string describe(const RouterConfig& config, std::int64_t num_tokens) {
  return std::string(name(config.scoring)) + " E " + std::to_string(config.num_experts) + " k " +
         std::to_string(config.topk) + " tokens " + std::to_string(num_tokens) + " renormalize " +
         std::to_string(config.renormalize) + " groups " + std::to_string(config.topk_group) + "/" +
         std::to_string(config.num_expert_group);
}

class CudaRouterSizesTest : public testing::CudaTestWith<std::int64_t> {
 protected:
  /// Calls check(config) for every scoring and k, normalized or not.
  template <typename Check>
  static void for_each_config(Check check) {
    for (ScoringFunc scoring : kScorings) {
      for (std::int64_t topk : {1, 2, 4, 8, 64}) {
        for (bool renormalize : {false, true}) {
          if (topk <= GetParam()) check(make_config(GetParam(), topk, scoring, renormalize));
        }
      }
    }
  }
};

TEST_P(CudaRouterSizesTest, RandomLogits) {
  for (std::int64_t num_tokens : {0, 1, 7, 300}) {
    const Tensor logits = random_logits({num_tokens, GetParam()}, 1);
    for_each_config([&](const RouterConfig& config) {
      SCOPED_TRACE(describe(config, num_tokens));
      expect_cpu_result(config, logits, {});
    });
  }
}

TEST_P(CudaRouterSizesTest, CorrectionBias) {
  Random random(2);
  const Tensor bias = filled({GetParam()}, [&] { return static_cast<float>(random.normal()) / 8; });
  for (std::int64_t num_tokens : {0, 1, 7, 300}) {
    const Tensor logits = random_logits({num_tokens, GetParam()}, 3);
    for_each_config([&](const RouterConfig& config) {
      SCOPED_TRACE(describe(config, num_tokens));
      expect_cpu_result(config, logits, bias);
    });
  }
}

TEST_P(CudaRouterSizesTest, TiesGoToTheLowestIndex) {
  const Tensor logits = tied_logits({40, GetParam()}, 4), bias = tied_logits({GetParam()}, 5);
  for_each_config([&](const RouterConfig& config) {
    SCOPED_TRACE(describe(config, 40));
    expect_cpu_result(config, logits, {});
    expect_cpu_result(config, logits, bias);
  });
}

TEST_P(CudaRouterSizesTest, Groups) {
  const std::int64_t num_experts = GetParam(), num_tokens = 40;
  const std::array logits = {random_logits({num_tokens, num_experts}, 6),
                             tied_logits({num_tokens, num_experts}, 7),
                             strange_logits({num_tokens, num_experts}, 8)};
  Random random(9);
  const Tensor bias =
      filled({num_experts}, [&] { return static_cast<float>(random.normal()) / 4; });
  for (std::int64_t groups : {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}, std::int64_t{8},
                              std::int64_t{24}, std::int64_t{64}, num_experts}) {
    if (num_experts % groups != 0) continue;
    for_each_config([&](RouterConfig config) {
      if (config.scoring == ScoringFunc::kSparsemixer) return;
      config.num_expert_group = groups;
      config.topk_group = (groups + 1) / 2;
      if (config.topk > config.topk_group * (num_experts / groups)) return;
      if (config.topk == 2 || config.topk == 4 || !config.renormalize) return;
      SCOPED_TRACE(describe(config, num_tokens));
      for (const Tensor& rows : logits) {
        expect_cpu_result(config, rows, {});
        expect_cpu_result(config, rows, bias);
      }
    });
  }
}

TEST_P(CudaRouterSizesTest, StrangeValues) {
  const Tensor logits = strange_logits({60, GetParam()}, 10);
  const Tensor bias = strange_logits({GetParam()}, 11);
  const Tensor none = filled({3, GetParam()}, [] { return kNan; });
  const Tensor masked = filled({3, GetParam()}, [] { return -kInf; });
  for_each_config([&](const RouterConfig& config) {
    SCOPED_TRACE(describe(config, 60));
    expect_cpu_result(config, logits, {});
    expect_cpu_result(config, logits, bias);
    expect_cpu_result(config, none, {});
    expect_cpu_result(config, masked, {});
  });
}

INSTANTIATE_TEST_SUITE_P(Experts, CudaRouterSizesTest,
                         ::testing::Values(1, 8, 31, 32, 60, 128, 256, 257, 384, 512, 2048));

using CudaRouterTest = testing::CudaTest;

TEST_F(CudaRouterTest, OneExpertTakesAll) {
  Tensor logits = random_logits({5000, 64}, 12);
  for (std::int64_t t = 0; t < 5000; ++t) logits.as<float>()[t * 64 + 17] = 30;
  const Routed routed = route_on_gpu(make_config(64, 1, ScoringFunc::kSoftmax), logits, {});
  EXPECT_EQ(routed.counts.as<std::int32_t>()[17], 5000);
}

TEST_F(CudaRouterTest, ManyTokens) {
  for (std::int64_t num_tokens : {31, 32, 33, 132, 133, 1056, 8449, 300000}) {
    const RouterConfig config = make_config(32, 4, ScoringFunc::kTopkSoftmax);
    SCOPED_TRACE(describe(config, num_tokens));
    expect_cpu_result(config, random_logits({num_tokens, 32}, 13), {});
  }
}

TEST_F(CudaRouterTest, TheHistogramIsOptional) {
  for (std::int64_t num_tokens : {0, 1, 7, 300}) {
    const RouterConfig config = make_config(60, 4, ScoringFunc::kSigmoid, true);
    const Tensor logits = random_logits({num_tokens, 60}, 14);
    Routed expected = route_on_cpu(config, logits, {});
    fill_bytes(expected.counts, 0, {});
    expect_same(route_on_gpu(config, logits, {}, false), expected);
  }
}

// Logits in 16 bits are those numbers in f32.
TEST_F(CudaRouterTest, LogitsOfSixteenBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const std::int64_t num_tokens : {1, 7, 300}) {
      for (const ScoringFunc scoring : kScorings) {
        const RouterConfig config = make_config(60, 4, scoring, true);
        SCOPED_TRACE(describe(config, num_tokens));
        const Tensor random = random_logits({num_tokens, 60}, 16);
        const Tensor logits = Tensor::empty(random.shape(), dtype);
        for (std::int64_t i = 0; i < random.numel(); ++i) {
          store_f32(logits.data(), dtype, i, random.as<float>()[i]);
          random.as<float>()[i] = load_f32(logits.data(), dtype, i);
        }
        expect_same(route_on_gpu(config, logits, {}), route_on_cpu(config, random, {}));
      }
    }
  }
}

TEST_F(CudaRouterTest, ARowDoesNotDependOnItsBatch) {
  const Tensor logits = random_logits({1000, 128}, 15);
  const RouterConfig config = make_config(128, 8, ScoringFunc::kSoftmax, true);
  const Routed together = route_on_gpu(config, logits, {});
  for (std::int64_t t : {0, 7, 999}) {
    const Tensor row(logits.slice(0, t, t + 1), logits.owner());
    const Routed alone = route_on_gpu(config, row, {});
    for (std::int64_t j = 0; j < 8; ++j) {
      EXPECT_EQ(alone.ids.as<std::int32_t>()[j], together.ids.as<std::int32_t>()[t * 8 + j]);
      EXPECT_EQ(alone.weights.as<float>()[j], together.weights.as<float>()[t * 8 + j]);
    }
  }
}

// Needs no device: nothing is launched, and nothing reads the memory.
TEST(CudaRouterArgumentsTest, AreNamed) {
  std::array<float, 64> memory{};
  const auto view = [&](DType dtype, const Shape& shape, int offset = 0) {
    return TensorView(memory.data() + offset, dtype, shape, testing::kGpu);
  };
  const TensorView logits = view(DType::kF32, {3, 4}), ids = view(DType::kI32, {3, 2}, 16),
                   weights = view(DType::kF32, {3, 2}, 32), counts = view(DType::kI32, {4}, 48);
  RouterConfig config = make_config(4, 2, ScoringFunc::kSoftmax);
  const auto fault = [&](const TensorView& in, const TensorView& bias, const Routing& out,
                         const TensorView& histogram) {
    return testing::argument_of([&] { cuda::route(config, in, bias, out, histogram, kStream); });
  };
  const TensorView on_cpu(memory.data(), DType::kF32, {3, 4});
  EXPECT_EQ(fault({}, {}, {ids, weights}, {}), "router_logits");
  EXPECT_EQ(fault(on_cpu, {}, {ids, weights}, {}), "router_logits");
  EXPECT_EQ(fault(view(DType::kF32, {3, 5}), {}, {ids, weights}, {}), "router_logits");
  EXPECT_EQ(fault(view(DType::kI32, {3, 4}), {}, {ids, weights}, {}), "router_logits");
  const TensorView misaligned(reinterpret_cast<char*>(memory.data()) + 2, DType::kF32, {3, 4},
                              testing::kGpu);
  EXPECT_EQ(fault(misaligned, {}, {ids, weights}, {}), "router_logits");
  EXPECT_EQ(fault(logits, view(DType::kF32, {5}), {ids, weights}, {}), "score_correction_bias");
  EXPECT_EQ(fault(logits, {}, {view(DType::kI64, {3, 2}), weights}, {}), "topk_ids");
  EXPECT_EQ(fault(logits, {}, {ids, view(DType::kF32, {2, 2}, 32)}, {}), "topk_weights");
  EXPECT_EQ(fault(logits, {}, {view(DType::kI32, {3, 2}), weights}, {}), "topk_ids");
  EXPECT_EQ(fault(logits, {}, {ids, weights}, view(DType::kI32, {5}, 48)), "expert_load");
  EXPECT_EQ(fault(logits, {}, {ids, weights}, view(DType::kI32, {4}, 16)), "expert_load");
  config.custom = [](const TensorView&, const TensorView&, const TensorView&) {};
  EXPECT_EQ(fault(logits, {}, {ids, weights}, counts), "router.custom");
  config = make_config(2049, 2, ScoringFunc::kSoftmax);
  EXPECT_EQ(fault(logits, {}, {ids, weights}, counts), "router.num_experts");
  config = make_config(128, 65, ScoringFunc::kSoftmax);
  EXPECT_EQ(fault(logits, {}, {ids, weights}, counts), "router.topk");
}

}  // namespace
}  // namespace fusedmoe
