// fused_experts(): an engine's own tensors and routing, packed once.
#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "fake_experts.h"
#include "fusedmoe/layer.h"
#include "layer_problem.h"
#include "testing/compare.h"

namespace fusedmoe::fused_experts_test {

using testing::bitwise_equal;
using testing::compare;
using testing::make_ids;
using testing::random_tensor;

constexpr std::int64_t kTokens = 5, kExperts = 4, kHidden = 32, kIntermediate = 16;

/// Arguments with memory of their own.
struct Call {
  Tensor x = random_tensor(DType::kBF16, {kTokens, kHidden}, 1, 1);
  Tensor w13 = random_tensor(DType::kBF16, {kExperts, 2 * kIntermediate, kHidden}, 0.2, 2);
  Tensor w2 = random_tensor(DType::kBF16, {kExperts, kHidden, kIntermediate}, 0.2, 3);
  Tensor ids = make_ids({kTokens, 2}, {0, 1, 2, 3, -1, 3, 1, 0, 2, -1});
  Tensor weights = random_tensor(DType::kF32, {kTokens, 2}, 1, 4);
  Tensor out = Tensor::empty({kTokens, kHidden}, DType::kBF16);
  FusedExpertsArgs args;

  Call() {
    args.hidden_states = x;
    args.weights.w13 = w13;
    args.weights.w2 = w2;
    args.topk_ids = ids;
    args.topk_weights = weights;
    args.output = out;
  }
  Tensor run(PackCache& cache) {
    testing::poison(args.output);
    fused_experts(args, cache);
    Tensor result = Tensor::empty(args.output.shape(), args.output.dtype());
    convert(args.output, result);
    return result;
  }
};

Tensor layer_output(const Call& call) {
  LayerWeights weights;
  weights.router.num_experts = kExperts;
  weights.router.topk = 2;
  weights.experts = ExpertWeights::from_stacked(
      call.args.weights, schemes::unquantized(DType::kBF16), Activation::kSilu);
  const MoeLayer layer(weights, {.dtype = DType::kBF16});
  const std::size_t bytes = layer.workspace_bytes(kTokens);
  const Tensor memory = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  Tensor output = Tensor::empty({kTokens, kHidden}, DType::kBF16);
  layer.forward_routed(call.x, {call.ids, call.weights}, output, {memory.data(), bytes});
  return output;
}

TEST(FusedExpertsTest, GivesTheBitsOfALayer) {
  Call call;
  PackCache cache;
  EXPECT_EQ(cache.size(), 0u);
  EXPECT_TRUE(bitwise_equal(call.run(cache), layer_output(call)));
  EXPECT_EQ(cache.size(), 1u);
  EXPECT_TRUE(bitwise_equal(call.run(cache), layer_output(call))) << "from the cache";
  EXPECT_EQ(cache.size(), 1u);
}

TEST(FusedExpertsTest, InPlaceAndNoTokens) {
  Call call;
  PackCache cache;
  const Tensor expected = call.run(cache);
  call.args.output = call.args.hidden_states;
  fused_experts(call.args, cache);
  EXPECT_TRUE(bitwise_equal(call.x, expected));
  call.args.hidden_states = call.args.output = call.x.slice(0, 0, 0);
  call.args.topk_ids = call.ids.slice(0, 0, 0);
  call.args.topk_weights = call.weights.slice(0, 0, 0);
  EXPECT_NO_THROW(fused_experts(call.args, cache));
  EXPECT_EQ(cache.size(), 1u);
}

TEST(FusedExpertsTest, ClearedCachePacksAgain) {
  Call call;
  PackCache cache;
  const Tensor expected = call.run(cache);
  cache.clear();
  EXPECT_EQ(cache.size(), 0u);
  EXPECT_TRUE(bitwise_equal(call.run(cache), expected));
}

TEST(FusedExpertsTest, OutputInF32) {
  Call call;
  PackCache cache;
  const Tensor narrow = call.run(cache);
  const Tensor wide = Tensor::empty({kTokens, kHidden}, DType::kF32);
  call.args.output = wide;
  fused_experts(call.args, cache);
  const Tensor rounded = Tensor::empty({kTokens, kHidden}, DType::kBF16);
  convert(wide, rounded);
  EXPECT_TRUE(bitwise_equal(rounded, narrow));
}

TEST(FusedExpertsTest, MapLeavesOutOtherRanks) {
  Call call;
  PackCache cache;
  // Global ids 0 to 7, of which every second is here.
  const Tensor map = make_ids({8}, {0, -1, 1, -1, 2, -1, 3, -1});
  const Tensor expected = call.run(cache);
  for (std::int64_t i = 0; i < call.ids.numel(); ++i) {
    std::int32_t& id = call.ids.as<std::int32_t>()[i];
    id = id < 0 ? 7 : 2 * id;
  }
  call.args.global_num_experts = 8;
  call.args.expert_map = map;
  EXPECT_TRUE(bitwise_equal(call.run(cache), expected));
  EXPECT_EQ(cache.size(), 2u) << "another configuration";
}

TEST(FusedExpertsTest, OtherWeightsArePackedAgain) {
  Call call;
  PackCache cache;
  const Tensor first = call.run(cache);
  // Square matrices at the same address that differ in strides alone.
  Call square;
  const Tensor w13 = random_tensor(DType::kBF16, {kExperts, 32, 32}, 0.2, 5);
  square.args.weights.w13 = w13;
  const Tensor straight = square.run(cache);
  square.args.weights.w13 = Tensor(w13.transpose(1, 2), w13.owner());
  EXPECT_FALSE(bitwise_equal(square.run(cache), straight));
  EXPECT_EQ(cache.size(), 3u);

  call.args.activation = Activation::kGelu;
  EXPECT_FALSE(bitwise_equal(call.run(cache), first));
  call.args.activation = Activation::kSilu;
  call.args.activation_params.limit = 0.25f;
  EXPECT_FALSE(bitwise_equal(call.run(cache), first));
  EXPECT_EQ(cache.size(), 5u);
}

TEST(FusedExpertsTest, ClearForgetsAndMovesKeep) {
  Call call;
  PackCache cache;
  const Tensor before = call.run(cache);
  std::memset(call.w2.data(), 0, static_cast<std::size_t>(call.w2.nbytes()));
  EXPECT_TRUE(bitwise_equal(call.run(cache), before)) << "packed weights are used";
  cache.clear();
  EXPECT_EQ(cache.size(), 0u);
  EXPECT_EQ(
      compare(call.run(cache), Tensor::zeros({kTokens, kHidden}, DType::kBF16)).max_norm_relative,
      0);
  PackCache other = std::move(cache);
  EXPECT_EQ(other.size(), 1u);
  EXPECT_EQ(cache.size(), 0u);  // NOLINT(bugprone-use-after-move): what is left is tested
  EXPECT_THROW(call.run(cache), Error);
  EXPECT_NO_THROW(call.run(other));
}

TEST(FusedExpertsTest, FaultsAreNamedAndLeaveTheOutput) {
  const struct {
    const char* argument;
    void (*spoil)(Call&);
  } faults[] = {
      {"hidden_states", [](Call& c) { c.args.hidden_states = {}; }},
      {"weights.w13", [](Call& c) { c.args.weights.w13 = {}; }},
      {"topk_ids", [](Call& c) { c.args.topk_ids = {}; }},
      {"topk_ids", [](Call& c) { c.ids.as<std::int32_t>()[0] = kExperts; }},
      {"topk_weights", [](Call& c) { c.args.topk_weights = {}; }},
      {"output", [](Call& c) { c.args.output = {}; }},
      {"require", [](Call& c) { c.args.require = "gpu"; }},
  };
  for (const auto& fault : faults) {
    Call call;
    PackCache cache;
    std::memset(call.out.data(), 0x3c, static_cast<std::size_t>(call.out.nbytes()));
    fault.spoil(call);
    try {
      fused_experts(call.args, cache);
      ADD_FAILURE() << fault.argument;
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), fault.argument) << error.what();
    }
    EXPECT_EQ(call.out.as<const unsigned char>()[0], 0x3c);
  }
}

}  // namespace fusedmoe::fused_experts_test
