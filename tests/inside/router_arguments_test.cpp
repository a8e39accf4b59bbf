// Malformed calls of route(), and malformed results of custom routing.
#include <gtest/gtest.h>

#include <cmath>

#include "router_cases.h"

namespace fusedmoe::router_arguments_test {

using testing::argument_of;
using testing::make_router;

TEST(RouterTest, BadArgumentsAreNamedAndTheOutputIsLeftAlone) {
  const RouterConfig config = make_router(4, 2, ScoringFunc::kSoftmax);
  const Tensor logits = Tensor::zeros({3, 4}, DType::kF32);
  const Tensor ids = Tensor::empty({3, 2}, DType::kI32);
  const Tensor weights = Tensor::empty({3, 2}, DType::kF32);
  const auto fault = [&](const TensorView& logits_view, const TensorView& bias,
                         const Routing& routing) {
    return argument_of([&] { route(config, logits_view, bias, routing); });
  };
  testing::poison(ids);
  testing::poison(weights);
  EXPECT_EQ(fault({}, {}, {ids, weights}), "router_logits");
  EXPECT_EQ(fault(Tensor::zeros({3, 5}, DType::kF32), {}, {ids, weights}), "router_logits");
  EXPECT_EQ(fault(Tensor::zeros({3, 4}, DType::kI32), {}, {ids, weights}), "router_logits");
  EXPECT_EQ(fault(Tensor::zeros({4, 3}, DType::kF32).transpose(0, 1), {}, {ids, weights}),
            "router_logits");
  EXPECT_EQ(fault(logits, Tensor::zeros({5}, DType::kF32), {ids, weights}),
            "score_correction_bias");
  EXPECT_EQ(fault(logits, {}, {Tensor::empty({3, 1}, DType::kI32), weights}), "topk_ids");
  EXPECT_EQ(fault(logits, {}, {Tensor::empty({3, 2}, DType::kI64), weights}), "topk_ids");
  EXPECT_EQ(fault(logits, {}, {ids, Tensor::empty({2, 2}, DType::kF32)}), "topk_weights");
  EXPECT_EQ(fault(logits, {}, {ids, {}}), "topk_weights");
  EXPECT_EQ(fault(logits, {}, {TensorView(weights.data(), DType::kI32, {3, 2}), weights}),
            "topk_ids");
  for (std::int64_t i = 0; i < 6; ++i) {
    EXPECT_EQ(ids.as<std::int32_t>()[i], 0x7f7f7f7f);
    EXPECT_TRUE(std::isnan(weights.as<float>()[i]));
  }
}

TEST(RouterTest, CustomRoutingMustReturnIdsInRange) {
  const Tensor logits = Tensor::zeros({1, 4}, DType::kF32);
  const Tensor ids = Tensor::empty({1, 1}, DType::kI32),
               weights = Tensor::zeros({1, 1}, DType::kF32);
  for (const std::int32_t bad : {-2, 4}) {
    RouterConfig config = make_router(4, 1, ScoringFunc::kSoftmax);
    config.custom = [bad](const TensorView&, const TensorView& to, const TensorView&) {
      to.as<std::int32_t>()[0] = bad;
    };
    EXPECT_THROW(route(config, logits, {}, {ids, weights}), Error);
  }
}

}  // namespace fusedmoe::router_arguments_test
