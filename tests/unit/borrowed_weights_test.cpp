// Weights in memory of the caller: no implementation needs it once it has packed them.
#include <gtest/gtest.h>

#include <cstring>

#include "fusedmoe/experts.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/selection.h"

namespace fusedmoe::borrowed_weights_test {

constexpr std::int64_t kExperts = 2, kHidden = 64, kInner = 32;

Tensor counted(Shape shape) {
  Tensor tensor = Tensor::empty(shape, DType::kBF16);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    store_f32(tensor.data(), DType::kBF16, i, static_cast<float>(i % 251));
  }
  return tensor;
}

TEST(BorrowedWeightsTest, AreNotNeededAfterPack) {
  const Tensor w13 = counted({kExperts, 2 * kInner, kHidden});
  const Tensor w2 = counted({kExperts, kHidden, kInner});
  const Tensor before = Tensor::empty({kHidden, kInner}, DType::kF32);
  convert(w2.select(0, 1), before);

  ExpertWeights::Stacked stacked;
  stacked.w13 = borrow(w13.data(), w13.dtype(), w13.shape());
  stacked.w2 = borrow(w2.data(), w2.dtype(), w2.shape());
  const ExpertWeights weights =
      ExpertWeights::from_stacked(stacked, schemes::unquantized(DType::kBF16), Activation::kSilu);
  ASSERT_TRUE(weights.borrowed);

  const MoeConfig config = moe_config(weights, 1, DType::kBF16);
  int packers = 0;
  for (const ExpertsDescriptor* descriptor : all_experts()) {
    if (!descriptor->supports(config)) continue;
    ++packers;
    const auto experts = descriptor->create(config, {});
    const Tensor saved = counted(w2.shape());
    const auto packed = experts->pack(weights, {});
    std::memset(w2.data(), 0, static_cast<std::size_t>(w2.nbytes()));
    const ExpertWeights unpacked = experts->unpack(*packed, 1);
    std::memcpy(w2.data(), saved.data(), static_cast<std::size_t>(w2.nbytes()));
    const Tensor after = Tensor::empty({kHidden, kInner}, DType::kF32);
    convert(unpacked.experts.front().down.values, after);
    EXPECT_EQ(std::memcmp(before.data(), after.data(), static_cast<std::size_t>(after.nbytes())), 0)
        << descriptor->name();
  }
  EXPECT_GE(packers, 2);
}

}  // namespace fusedmoe::borrowed_weights_test
