// What an engine asks of a layer beside the plain forward: a part of the experts, sums in f32,
// rows with a stride, a limit of scratch memory, counts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "fake_experts.h"
#include "fusedmoe/layer.h"
#include "layer_problem.h"
#include "testing/compare.h"

namespace fusedmoe::partial_layers_test {

using testing::bitwise_equal;
using testing::compare;
using testing::layer_options;
using testing::LayerSpec;
using testing::make_hidden_states;
using testing::make_ids;
using testing::make_layer_weights;
using testing::Scratch;

constexpr std::int64_t kExperts = 8, kHidden = 64;

LayerSpec shared_spec() {
  LayerSpec spec;
  spec.shared_experts = spec.shared_gate = true;
  return spec;
}

Tensor f32_copy(const TensorView& view) {
  Tensor result = Tensor::empty(view.shape(), DType::kF32);
  convert(view, result);
  return result;
}

Tensor rounded(const TensorView& view, DType dtype) {
  Tensor result = Tensor::empty(view.shape(), dtype);
  convert(view, result);
  return result;
}

class Variants : public ::testing::TestWithParam<std::string> {
 protected:
  LayerOptions options(DType dtype = DType::kBF16) const {
    return layer_options(dtype, GetParam());
  }
};
INSTANTIATE_TEST_SUITE_P(Layer, Variants,
                         ::testing::Values("cpu", "cpu_batched", "cpu_unfused", "cpu_monolithic",
                                           "reference", "reference_batched"),
                         [](const auto& info) { return info.param; });

/// Those of rank `rank` of two: every second expert, counted from its end.
LayerWeights half_of(const LayerWeights& whole, std::int64_t rank) {
  LayerWeights half = whole;
  half.experts.experts.clear();
  half.expert_map = Tensor::empty({kExperts}, DType::kI32);
  for (std::int64_t expert = kExperts - 1; expert >= 0; --expert) {
    const bool mine = expert % 2 == rank;
    half.expert_map.as<std::int32_t>()[expert] =
        mine ? static_cast<std::int32_t>(half.experts.num_experts()) : -1;
    if (mine) {
      half.experts.experts.push_back(whole.experts.experts[static_cast<std::size_t>(expert)]);
    }
  }
  return half;
}

TEST_P(Variants, TwoRanksAddUpToTheWhole) {
  const LayerWeights weights = make_layer_weights({});
  const Tensor x = make_hidden_states(DType::kBF16, 9, kHidden);
  LayerOptions rank_options = options();
  rank_options.output_dtype = DType::kF32;
  const Tensor whole = MoeLayer(weights, rank_options).forward(x);

  rank_options.parallel.ep_size = 2;
  EXPECT_THROW(MoeLayer(weights, rank_options), Error) << "a rank without a map";
  const Tensor sum = Tensor::zeros(x.shape(), DType::kF32);
  for (const int rank : {0, 1}) {
    rank_options.parallel.ep_rank = rank;
    const MoeLayer layer(half_of(weights, rank), rank_options);
    EXPECT_EQ(layer.config().num_local_experts, kExperts / 2);
    EXPECT_TRUE(layer.config().has_expert_map);
    const Scratch scratch(layer, 9);
    layer.forward(x, sum, scratch.workspace, {.accumulate = true});
  }
  // Batched rows are rounded to bf16 before they are weighted, the same on a rank and alone; a sum
  // of two parts rounds in f32.
  EXPECT_LE(compare(sum, whole).max_norm_relative, 1e-6);
}

TEST_P(Variants, IdsOfOtherRanksAreSkipped) {
  const MoeLayer layer(half_of(make_layer_weights({}), 1), options());
  const Tensor x = make_hidden_states(DType::kBF16, 2, kHidden);
  const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
  const Scratch scratch(layer, 2);
  const Tensor weights = Tensor::empty({2, 2}, DType::kF32);
  std::fill_n(weights.as<float>(), 4, 0.5f);
  const auto forward = [&](const Tensor& ids) {
    testing::poison(output);
    layer.forward_routed(x, {ids, weights}, output, scratch.workspace);
    return rounded(output, DType::kBF16);
  };
  const Tensor zeros = Tensor::zeros(x.shape(), DType::kBF16);
  EXPECT_TRUE(bitwise_equal(forward(make_ids({2, 2}, {0, 2, 4, 6})), zeros));
  EXPECT_TRUE(bitwise_equal(forward(make_ids({2, 2}, {0, 3, 5, 6})),
                            forward(make_ids({2, 2}, {-1, 3, 5, -1}))));
  EXPECT_FALSE(bitwise_equal(forward(make_ids({2, 2}, {0, 3, 5, 6})), zeros));
}

TEST_P(Variants, OutputInF32IsTheUnroundedOne) {
  for (const bool shared : {false, true}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      const LayerWeights weights = make_layer_weights(shared ? shared_spec() : LayerSpec{});
      LayerOptions wide = options(dtype);
      wide.output_dtype = DType::kF32;
      const Tensor x = make_hidden_states(dtype, 7, kHidden);
      const Tensor f32 = MoeLayer(weights, wide).forward(x);
      ASSERT_EQ(f32.dtype(), DType::kF32);
      const Tensor narrow = MoeLayer(weights, options(dtype)).forward(x);
      const bool batched =
          layer_options(dtype, GetParam()).require.find("+batched") != std::string::npos;
      if (batched) {
        // Rows are rounded to the narrow dtype before they are weighted, or not at all.
        EXPECT_LE(compare(f32_copy(narrow), f32).max_norm_relative, 2e-2);
      } else if (!shared) {
        EXPECT_TRUE(bitwise_equal(rounded(f32, dtype), narrow)) << name(dtype);
      } else {
        // The sum with the shared experts rounds three times in the narrow dtype.
        EXPECT_LE(compare(f32_copy(narrow), f32).max_norm_relative, 2e-2);
      }
    }
  }
}

TEST_P(Variants, AccumulateAdds) {
  for (const bool shared : {false, true}) {
    LayerOptions wide = options();
    wide.output_dtype = DType::kF32;
    const MoeLayer layer(make_layer_weights(shared ? shared_spec() : LayerSpec{}), wide);
    const Tensor x = make_hidden_states(DType::kBF16, 5, kHidden);
    const Tensor plain = layer.forward(x);
    const Tensor before = make_hidden_states(DType::kF32, 5, kHidden);
    const Tensor sum = f32_copy(before);
    const Scratch scratch(layer, 5);
    layer.forward(x, sum, scratch.workspace, {.accumulate = true});
    Tensor expected = f32_copy(before);
    for (std::int64_t i = 0; i < expected.numel(); ++i) {
      expected.as<float>()[i] += plain.as<float>()[i];
    }
    EXPECT_LE(compare(sum, expected).max_norm_relative, 1e-6);
  }
}

TEST_P(Variants, RowsMayHaveAStride) {
  constexpr std::int64_t kStride = kHidden + 24, kTokens = 6;
  const MoeLayer layer(make_layer_weights(shared_spec()), options());
  const Tensor x = make_hidden_states(DType::kBF16, kTokens, kHidden);
  const Tensor expected = layer.forward(x);
  const Tensor in = Tensor::empty({kTokens, kStride}, DType::kBF16);
  const Tensor out = Tensor::empty({kTokens, kStride}, DType::kBF16);
  for (const Tensor* tensor : {&in, &out}) {
    std::memset(tensor->data(), 0x5a, static_cast<std::size_t>(tensor->nbytes()));
  }
  const TensorView rows_in = in.slice(1, 0, kHidden), rows_out = out.slice(1, 0, kHidden);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    std::memcpy(rows_in.select(0, t).data(), x.select(0, t).data(), kHidden * 2);
  }
  const Scratch scratch(layer, kTokens);
  layer.forward(rows_in, rows_out, scratch.workspace);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    EXPECT_EQ(std::memcmp(rows_out.select(0, t).data(), expected.select(0, t).data(), kHidden * 2),
              0)
        << t;
    for (const Tensor* tensor : {&in, &out}) {
      const auto* gap = tensor->as<const unsigned char>() + (t * kStride + kHidden) * 2;
      EXPECT_TRUE(std::all_of(gap, gap + 48, [](unsigned char c) { return c == 0x5a; })) << t;
    }
  }
}

// What lies behind a row is no part of it, be it as wide as the padding of a tile.
TEST_P(Variants, NothingBehindARowIsRead) {
  constexpr std::int64_t kShort = 40, kStride = 64, kTokens = 3;
  LayerSpec spec;
  spec.experts.hidden = kShort;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    LayerOptions wanted = options();
    wanted.dtype = dtype;
    const MoeLayer layer(make_layer_weights(spec), wanted);
    const Tensor x = make_hidden_states(dtype, kTokens, kShort);
    const Tensor in = Tensor::empty({kTokens, kStride}, dtype);
    std::memset(in.data(), 0xff, static_cast<std::size_t>(in.nbytes()));  // NaN
    const auto row_bytes = static_cast<std::size_t>(bytes(dtype, kShort));
    for (std::int64_t t = 0; t < kTokens; ++t) {
      std::memcpy(in.select(0, t).data(), x.select(0, t).data(), row_bytes);
    }
    const Tensor output = Tensor::empty(x.shape(), dtype);
    const Scratch scratch(layer, kTokens);
    layer.forward(in.slice(1, 0, kShort), output, scratch.workspace);
    EXPECT_TRUE(bitwise_equal(output, layer.forward(x))) << name(dtype);
  }
}

TEST(MoeLayerHooks, SeeAllTokensAtOnce) {
  LayerOptions options = layer_options(DType::kBF16, "cpu_unfused");
  const LayerWeights weights = make_layer_weights(LayerSpec{});
  options.max_workspace_bytes = MoeLayer(weights, options).workspace_bytes(8);
  const MoeLayer layer(weights, options);
  const ExpertsHooks hooks;
  for (const std::int64_t tokens : {8, 9}) {
    const Tensor x = make_hidden_states(DType::kBF16, tokens, kHidden);
    const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
    const Scratch scratch(layer, tokens);
    const auto forward = [&] { layer.forward(x, output, scratch.workspace, {.hooks = &hooks}); };
    if (tokens == 8) {
      EXPECT_NO_THROW(forward());
    } else {
      EXPECT_THROW(forward(), Error);
    }
  }
}

TEST(MoeLayerWeights, TheMapIsCopied) {
  LayerWeights weights = make_layer_weights(LayerSpec{});
  const Tensor map = Tensor::empty({kExperts}, DType::kI32);
  for (int e = 0; e < kExperts; ++e) map.as<std::int32_t>()[e] = e;
  weights.expert_map = map;
  const MoeLayer layer(weights);
  const Tensor x = make_hidden_states(DType::kBF16, 4, kHidden);
  const Tensor expected = layer.forward(x);
  std::fill_n(map.as<std::int32_t>(), kExperts, -1);
  EXPECT_TRUE(bitwise_equal(layer.forward(x), expected));
}

TEST_P(Variants, ChunksGiveTheSameBits) {
  const LayerWeights weights = make_layer_weights(shared_spec());
  LayerOptions whole = options();
  whole.batch_invariant = true;
  const MoeLayer layer(weights, whole);
  const Tensor x = make_hidden_states(DType::kBF16, 70, kHidden);
  const Tensor expected = layer.forward(x);
  for (const std::int64_t tokens : {1, 8, 33}) {
    LayerOptions limited = whole;
    limited.max_workspace_bytes = layer.workspace_bytes(tokens);
    const MoeLayer chunked(weights, limited);
    for (const std::int64_t count : {1, 7, 8, 64, 70, 100000}) {
      EXPECT_LE(chunked.workspace_bytes(count), limited.max_workspace_bytes);
      EXPECT_EQ(chunked.workspace_bytes(count), layer.workspace_bytes(std::min(count, tokens)))
          << count << " tokens in chunks of " << tokens;
    }
    const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
    const Tensor logits = Tensor::empty({70, kExperts}, DType::kF32);
    const Tensor ids = Tensor::empty({70, 2}, DType::kI32);
    const Tensor load = Tensor::empty({kExperts}, DType::kI32);
    const Scratch scratch(chunked, 70);
    chunked.forward(x, output, scratch.workspace,
                    {.router_logits = logits, .topk_ids = ids, .expert_load = load});
    EXPECT_TRUE(bitwise_equal(output, expected)) << tokens;

    std::vector<std::int32_t> counted(kExperts);
    for (std::int64_t i = 0; i < ids.numel(); ++i) {
      ++counted[static_cast<std::size_t>(ids.as<std::int32_t>()[i])];
    }
    EXPECT_EQ(
        std::vector<std::int32_t>(load.as<std::int32_t>(), load.as<std::int32_t>() + kExperts),
        counted);
  }
}

TEST_P(Variants, ExpertLoadCountsTheExpertsOfAllRanks) {
  LayerWeights weights = half_of(make_layer_weights({}), 0);
  const Tensor chosen = make_ids({3, 2}, {7, 0, -1, 7, 3, -1});
  weights.router.custom = [&](const TensorView&, const TensorView& ids, const TensorView& w) {
    std::memcpy(ids.data(), chosen.data(), static_cast<std::size_t>(ids.nbytes()));
    std::fill_n(w.as<float>(), w.numel(), 0.5f);
  };
  const MoeLayer layer(weights, options());
  const Tensor x = make_hidden_states(DType::kBF16, 3, kHidden);
  const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
  const Tensor load = Tensor::empty({kExperts}, DType::kI32);
  testing::poison(load);
  const Scratch scratch(layer, 3);
  layer.forward(x, output, scratch.workspace, {.expert_load = load});
  EXPECT_TRUE(bitwise_equal(load, make_ids({8}, {1, 0, 0, 1, 0, 0, 0, 2})));
  layer.forward(x.slice(0, 0, 0), output.slice(0, 0, 0), scratch.workspace, {.expert_load = load});
  EXPECT_TRUE(bitwise_equal(load, Tensor::zeros({8}, DType::kI32))) << "none, not those before";
}

TEST(RouterlessLayerTest, TakesRoutedIdsOnly) {
  LayerWeights weights = make_layer_weights({});
  const MoeLayer whole(weights, layer_options(DType::kBF16, "cpu"));
  weights.router_weights = {};
  const MoeLayer layer(weights, layer_options(DType::kBF16, "cpu"));
  const Tensor x = make_hidden_states(DType::kBF16, 2, kHidden);
  const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
  const Tensor expected = Tensor::empty(x.shape(), DType::kBF16);
  const Scratch scratch(whole, 2);
  EXPECT_THROW(layer.forward(x), Error);
  EXPECT_THROW(layer.forward(x, output, scratch.workspace), Error);
  const Tensor ids = make_ids({2, 2}, {0, 1, 7, 3});
  const Tensor topk_weights = testing::make_f32({2, 2}, {0.5f, 0.25f, 1, 2});
  layer.forward_routed(x, {ids, topk_weights}, output, scratch.workspace);
  whole.forward_routed(x, {ids, topk_weights}, expected, scratch.workspace);
  EXPECT_TRUE(bitwise_equal(output, expected));
}

}  // namespace fusedmoe::partial_layers_test
