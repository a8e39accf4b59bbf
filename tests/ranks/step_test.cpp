// A forward in three parts, and with sizes of its own: exact or fixed, in one pass or in several.
#include "rank_layers.h"

namespace fusedmoe::step_test {

using testing::bitwise_equal;
using testing::Case;
using testing::compare;
using testing::errors_of_ranks;
using testing::forward_exactly;
using testing::kPatient;
using testing::make_communicators;
using testing::make_layer_weights;
using testing::one_rank_options;
using testing::random_tensor;
using testing::rank_options;
using testing::RankCase;
using testing::run_ranks;
using testing::Scratch;

constexpr std::int64_t kTokens = 6, kHidden = 64;

LayerWeights weights_of(std::uint64_t seed) {
  Case spec;
  spec.num_experts = 7;
  spec.topk = 3;
  spec.hidden = spec.intermediate = kHidden;
  spec.seed = seed;
  testing::LayerSpec layer{spec};
  layer.shared_experts = true;
  return make_layer_weights(layer);
}

Tensor hidden_states_of(int rank, std::int64_t tokens = kTokens) {
  return random_tensor(DType::kBF16, {tokens, kHidden}, 1, 20 + static_cast<std::uint64_t>(rank));
}

class Steps : public ::testing::TestWithParam<testing::Way> {
 protected:
  RankCase how_{.size = 3, .transport = GetParam().transport, .lend = GetParam().lend};
};
INSTANTIATE_TEST_SUITE_P(Ranks, Steps, ::testing::ValuesIn(testing::kWays), testing::name_of);

/// Two layers in turns, and the caller's own work between the parts.
TEST_P(Steps, ThreePartsGiveTheBitsOfAForward) {
  const LayerWeights first_weights = weights_of(1), second_weights = weights_of(2);
  for (const bool fixed_sizes : {false, true}) {
    const auto comms = make_communicators(3, how_.lend, {kPatient});
    run_ranks(3, [&](int rank) {
      const LayerOptions options = rank_options(how_, DType::kBF16, kTokens, comms[rank]);
      const MoeLayer first(first_weights, options), second(second_weights, options);
      const Tensor x = hidden_states_of(rank, kTokens - rank);
      const Tensor outputs[] = {Tensor::empty(x.shape(), x.dtype()),
                                Tensor::empty(x.shape(), x.dtype())};
      const Scratch one(first, kTokens, fixed_sizes), other(second, kTokens, fixed_sizes);
      ForwardOptions forward;
      forward.fixed_sizes = fixed_sizes;
      MoeLayer::Step a = first.begin(x, outputs[0], one.workspace, forward);
      comms[rank]->barrier();
      MoeLayer::Step b = second.begin(x, outputs[1], other.workspace, forward);
      MoeLayer::Step moved(std::move(a));
      moved.compute();
      b.compute();
      comms[rank]->barrier();
      moved.finish();
      b.finish();
      EXPECT_TRUE(bitwise_equal(outputs[0],
                                forward_exactly(first, x, kTokens, nullptr, nullptr, fixed_sizes)));
      EXPECT_TRUE(bitwise_equal(
          outputs[1], forward_exactly(second, x, kTokens, nullptr, nullptr, fixed_sizes)));
      // NOLINTNEXTLINE(bugprone-use-after-move)
      EXPECT_THROW(a.compute(), Error);
    });
  }
}

TEST_P(Steps, OneThatIsThrownAwayEndsTheCommunicator) {
  for (const bool computed : {false, true}) {
    const auto comms = make_communicators(3, how_.lend, {kPatient});
    const auto errors = errors_of_ranks(3, [&](int rank) {
      const MoeLayer layer(weights_of(1), rank_options(how_, DType::kBF16, kTokens, comms[rank]));
      const Tensor x = hidden_states_of(rank);
      const Tensor output = Tensor::empty(x.shape(), x.dtype());
      const Scratch scratch(layer, kTokens);
      MoeLayer::Step step = layer.begin(x, output, scratch.workspace);
      if (computed) step.compute();
      if (rank == 1) return;
      if (!computed) step.compute();
      step.finish();
      comms[rank]->barrier();  // a rank may be done before another gives up
    });
    EXPECT_EQ(errors[0], "rank 1: a forward was begun and not finished");
    EXPECT_EQ(errors[2], errors[0]);
  }
}

/// One layer serves both.
TEST_P(Steps, ForwardsOfExactAndOfFixedSizesMayFollowEachOther) {
  const LayerWeights weights = weights_of(1);
  const auto comms = make_communicators(3, how_.lend, {kPatient});
  run_ranks(3, [&](int rank) {
    const MoeLayer layer(weights, rank_options(how_, DType::kBF16, kTokens, comms[rank]));
    const MoeLayer alone(weights, one_rank_options(how_, DType::kBF16));
    for (const bool fixed_sizes : {true, false, false, true}) {
      const Tensor x = hidden_states_of(rank, rank);
      const Tensor output = forward_exactly(layer, x, 3, nullptr, nullptr, fixed_sizes);
      EXPECT_LE(compare(output, forward_exactly(alone, x, 0)).max_norm_relative, 2e-2);
    }
  });
}

TEST_P(Steps, ARankWithSizesOfAnotherKind) {
  const auto comms = make_communicators(3, how_.lend, {kPatient});
  const auto errors = errors_of_ranks(3, [&](int rank) {
    const MoeLayer layer(weights_of(1), rank_options(how_, DType::kBF16, kTokens, comms[rank]));
    forward_exactly(layer, hidden_states_of(rank), kTokens, nullptr, nullptr, rank == 2);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("exact sizes, but rank 2 is at step 0"), std::string::npos) << error;
    EXPECT_NE(error.find("fixed sizes"), std::string::npos) << error;
  }
}

TEST_P(Steps, FixedSizesDoNotSuitRowsForEachSlot) {
  how_.batch_invariant = true;
  const auto comms = make_communicators(3, how_.lend, {kPatient});
  const auto errors = errors_of_ranks(3, [&](int rank) {
    const MoeLayer layer(weights_of(1), rank_options(how_, DType::kBF16, kTokens, comms[rank]));
    forward_exactly(layer, hidden_states_of(rank), kTokens, nullptr, nullptr, true);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("fixed_sizes cannot be used with combine per_slot"), std::string::npos)
        << error;
  }
}

/// All tokens choose the experts of rank 0, where there is room for twice their mean.
TEST_P(Steps, MoreExpertRowsThanThereIsRoomForTakeSeveralPasses) {
  constexpr std::int64_t kMany = 500;
  const LayerWeights weights = weights_of(1);
  for (const char* experts : {"cpu", "reference"}) {
    for (const bool batch_invariant : {false, true}) {
      how_.experts = experts;
      how_.batch_invariant = batch_invariant;
      const auto comms = make_communicators(3, how_.lend, {kPatient});
      run_ranks(3, [&](int rank) {
        const MoeLayer layer(weights, rank_options(how_, DType::kBF16, kMany, comms[rank]));
        const MoeLayer alone(weights, one_rank_options(how_, DType::kBF16));
        const Tensor x = hidden_states_of(rank, kMany - rank);
        const Tensor factors = random_tensor(DType::kF32, {x.size(0), 3}, 1, 9);
        const Tensor ids = Tensor::empty({x.size(0), 3}, DType::kI32);
        for (std::int64_t i = 0; i < ids.numel(); ++i) {
          ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(i % 3);  // linear: 0 1 2 | ...
        }
        const Routing routing{ids, factors};
        const Tensor output = forward_exactly(layer, x, kMany, &routing);
        const Tensor expected = forward_exactly(alone, x, 0, &routing);
        if (batch_invariant && how_.experts == "cpu") {
          EXPECT_TRUE(bitwise_equal(output, expected)) << "rank " << rank;
        } else {
          EXPECT_LE(compare(output, expected).max_norm_relative, 2e-2) << "rank " << rank;
        }
      });
    }
  }
}

/// Less than for all slots of all tokens on one rank, and never less for more tokens.
TEST(StepSizesTest, WorkspaceFollowsTheRowsThatAreLikely) {
  constexpr std::int64_t kMany = 10000;
  const auto comms = make_communicators(4, false, {kPatient});
  run_ranks(4, [&](int rank) {
    const RankCase how{.size = 4, .lend = false};
    Case spec;
    spec.num_experts = 64;
    spec.topk = 8;
    spec.hidden = spec.intermediate = kHidden;
    const MoeLayer layer(make_layer_weights({spec}),
                         rank_options(how, DType::kBF16, kMany, comms[rank]));
    EXPECT_LT(layer.workspace_bytes(kMany), layer.workspace_bytes(kMany, true) * 9 / 10);
    EXPECT_LE(layer.workspace_bytes(8), layer.workspace_bytes(8, true)) << "few rows";
    LayerOptions limited = rank_options(how, DType::kBF16, kMany, comms[rank]);
    limited.ranks.receive_capacity = 300;
    const MoeLayer with_capacity(make_layer_weights({spec}), limited);
    for (std::int64_t n = 1; n < 600; ++n) {  // around the first sizes with less room
      EXPECT_LE(layer.workspace_bytes(n), layer.workspace_bytes(n + 1)) << n;
      EXPECT_LE(with_capacity.workspace_bytes(n), with_capacity.workspace_bytes(n + 1)) << n;
    }
  });
}

}  // namespace fusedmoe::step_test
