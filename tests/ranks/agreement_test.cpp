// Ranks of a layer must agree on it: what differs, or what one throws, is an Error of all.
#include <gtest/gtest.h>

#include <array>
#include <latch>

#include "error_text.h"
#include "rank_layers.h"

namespace fusedmoe::agreement_test {

using testing::Communicators;
using testing::errors_of_ranks;
using testing::forward_exactly;
using testing::has;
using testing::kPatient;
using testing::make_hidden_states;
using testing::rank_options;
using testing::small_weights;

constexpr std::int64_t kTokens = 4;

/// Makes a layer on three ranks whose options `change` changes.
std::vector<std::string> errors_of_making(
    const std::function<void(int rank, LayerWeights&, LayerOptions&)>& change) {
  const Communicators comms = make_thread_communicators(3, {kPatient});
  return errors_of_ranks(3, [&](int rank) {
    LayerWeights weights = small_weights();
    LayerOptions options = rank_options({.size = 3}, DType::kBF16, kTokens, comms[rank]);
    change(rank, weights, options);
    const MoeLayer layer(std::move(weights), options);
  });
}

TEST(AgreementTest, WhatDiffersIsNamedOnEveryRank) {
  const auto errors = errors_of_making([](int rank, LayerWeights& weights, LayerOptions&) {
    if (rank == 1) weights.router.topk = 3;
  });
  EXPECT_EQ(errors[0], "the ranks of a layer differ in topk: ranks 0, 2 have 2, rank 1 has 3");
  EXPECT_EQ(errors[1], errors[0]);
  EXPECT_EQ(errors[2], errors[0]);
}

/// Monolithic experts of one rank route the tokens of the others, too.
TEST(AgreementTest, SettingsOfTheRouterAreOneFact) {
  const std::pair<const char*, void (*)(LayerWeights&)> changes[] = {
      {"sigmoid, renormalized", [](auto& w) { w.router.scoring = ScoringFunc::kSigmoid; }},
      {"sparsemixer, jitter 0.5, renormalized",
       [](auto& w) {
         w.router.scoring = ScoringFunc::kSparsemixer;
         w.router.sparsemixer_jitter = 0.5F;
       }},
      {"softmax", [](auto& w) { w.router.renormalize = false; }},
      {"softmax, renormalized with epsilon 0.25",
       [](auto& w) { w.router.renormalize_epsilon = 0.25; }},
      {"softmax, renormalized, 2 of 3 groups",
       [](auto& w) {
         w.router.num_expert_group = 3;
         w.router.topk_group = 2;
       }},
      {"softmax, renormalized, scaled by 2.5",
       [](auto& w) { w.router.routed_scaling_factor = 2.5F; }},
      {"softmax, renormalized, score correction bias",
       [](auto& w) { w.router_weights.score_correction_bias = Tensor::zeros({6}, DType::kF32); }},
  };
  for (const bool monolithic : {false, true}) {
    for (const auto& [text, change] : changes) {
      const auto errors = errors_of_making(
          [&, change = change](int rank, LayerWeights& weights, LayerOptions& options) {
            options.require = "cpu+allgather_reducescatter";
            options.monolithic = monolithic;
            if (rank == 1) change(weights);
          });
      // The texts of ranks in their alphabetical order.
      const std::string usual = "ranks 0, 2 have softmax, renormalized";
      const std::string other = std::string("rank 1 has ") + text;
      const bool first = std::string_view(text) < "softmax, renormalized";
      EXPECT_EQ(errors[0], "the ranks of a layer differ in router: " +
                               (first ? other + ", " + usual : usual + ", " + other));
      EXPECT_EQ(errors[1], errors[0]);
      EXPECT_EQ(errors[2], errors[0]);
    }
  }
}

TEST(AgreementTest, EveryFieldCounts) {
  using W = LayerWeights;
  using O = LayerOptions;
  const std::pair<const char*, void (*)(W&, O&)> changes[] = {
      {"dtype", [](W&, O& o) { o.dtype = DType::kF32; }},
      {"pair", [](W&, O& o) { o.require = "cpu+allgather_reducescatter"; }},
      {"pair", [](W&, O& o) { o.require = "reference+all2all"; }},
      {"max_tokens_per_rank", [](W&, O& o) { ++o.ranks.max_tokens_per_rank; }},
      {"receive_capacity", [](W&, O& o) { o.ranks.receive_capacity = 5; }},
      {"drop_rows", [](W&, O& o) { o.ranks.drop_rows = true; }},
      {"combine", [](W&, O& o) { o.ranks.combine = CombineMode::kPerSlot; }},
      {"dispatch_dtype", [](W&, O& o) { o.ranks.dispatch_dtype = DType::kBF16; }},
      {"combine_dtype", [](W&, O& o) { o.ranks.combine_dtype = DType::kF32; }},
      {"replica_choice", [](W&, O& o) { o.ranks.replica_choice = ReplicaChoice::kNearest; }},
      {"placement", [](W&, O& o) { o.ranks.placement = ExpertPlacement::round_robin(6, 3); }},
      {"router", [](W& w, O&) { w.router.routed_scaling_factor = 2; }},
      {"dp_size", [](W&, O& o) { o.parallel = {.tp_size = 3, .dp_size = 3, .tp_rank = 2}; }},
  };
  for (const auto& [field, change] : changes) {
    const auto errors = errors_of_making([&, change = change](int rank, W& weights, O& options) {
      if (rank == 2) change(weights, options);
    });
    EXPECT_FALSE(errors[0].empty()) << field;
    EXPECT_EQ(errors[0], errors[1]) << field;
    EXPECT_EQ(errors[0], errors[2]) << field;
    EXPECT_TRUE(has(errors[0], field) || has(errors[0], "rank 2")) << field << ": " << errors[0];
  }
}

TEST(AgreementTest, AnErrorOfOneRankIsThatOfAllAndTheCommunicatorLives) {
  const Communicators comms = make_thread_communicators(2, {kPatient});
  const auto errors = errors_of_ranks(2, [&](int rank) {
    LayerWeights weights = small_weights();
    LayerOptions options = rank_options({}, DType::kBF16, kTokens, comms[rank]);
    if (rank == 0) weights.experts.experts.pop_back();
    const MoeLayer layer(std::move(weights), options);
  });
  EXPECT_TRUE(has(errors[0], "rank 0: experts: was 5 experts")) << errors[0];
  EXPECT_EQ(errors[0], errors[1]);
  testing::run_ranks(2, [&](int rank) {
    const MoeLayer layer(small_weights(), rank_options({}, DType::kBF16, kTokens, comms[rank]));
    forward_exactly(layer, make_hidden_states(DType::kBF16, 3, 64), kTokens);
  });
}

/// Whatever a rank throws while it packs weights or runs, the others learn it at once.
TEST(AgreementTest, WhatIsNoStdExceptionEndsAllToo) {
  for (const bool making : {true, false}) {
    const Communicators comms = make_thread_communicators(2, {kPatient});
    std::array<int, 2> thrown{};
    const auto errors = errors_of_ranks(2, [&](int rank) {
      LayerWeights weights = small_weights();
      LayerOptions options = rank_options({}, DType::kBF16, kTokens, comms[rank]);
      if (rank == 1 && making) options.progress = [](auto, auto) { throw 42; };
      weights.router.custom = [&, rank](const TensorView&, const TensorView& ids,
                                        const TensorView& factors) {
        if (rank == 1) throw 42;
        std::fill_n(ids.as<std::int32_t>(), ids.numel(), 0);
        std::fill_n(factors.as<float>(), factors.numel(), 1.0F);
      };
      try {
        const MoeLayer layer(std::move(weights), options);
        forward_exactly(layer, make_hidden_states(DType::kBF16, 3, 64), kTokens);
      } catch (const int number) {
        thrown[rank] = number;
      }
    });
    EXPECT_EQ(errors[0], "rank 1: an unknown exception");
    EXPECT_EQ(thrown[1], 42);
  }
}

TEST(AgreementTest, ALayerOnAPartNamesRanksOfTheWhole) {
  const Communicators comms = make_thread_communicators(4, {kPatient});
  // What fails in a step ends both parts: that of ranks 0 and 2 waits for the other's agreement.
  std::latch odd_ranks(2);
  struct Done {
    std::latch* ranks;
    ~Done() {
      if (ranks) ranks->count_down();
    }
  };
  const auto errors = errors_of_ranks(4, [&](int rank) {
    const auto part = comms[rank]->split(rank % 2);
    LayerWeights weights = small_weights();
    if (rank == 3) weights.router.topk = 3;
    const Done done{rank % 2 == 1 ? &odd_ranks : nullptr};
    const MoeLayer layer(std::move(weights), rank_options({}, DType::kBF16, kTokens, part));
    odd_ranks.wait();
    const std::int64_t tokens = rank == 2 ? 1 : kTokens;
    forward_exactly(layer, make_hidden_states(DType::kBF16, tokens, 64), tokens);
  });
  EXPECT_EQ(errors[1], "the ranks of a layer differ in topk: rank 1 has 2, rank 3 has 3");
  EXPECT_EQ(errors[3], errors[1]);
  EXPECT_TRUE(has(errors[0], "rank 0 is at step 0 of layer 0 with at most 4 tokens")) << errors[0];
  EXPECT_TRUE(has(errors[0], "but rank 2 is at step 0 of layer 0 with at most 1 token"))
      << errors[0];
}

}  // namespace fusedmoe::agreement_test
