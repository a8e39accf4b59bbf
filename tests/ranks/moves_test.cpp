// Experts that move between ranks while the layer serves: the bits stay those of one rank, and what
// a rank holds is what a layer made with the new placement holds.
#include <algorithm>
#include <atomic>
#include <thread>

#include "../unit/temporary_directory.h"
#include "fusedmoe/quant.h"
#include "moving.h"

namespace fusedmoe::moves_test {

using testing::bitwise_equal;
using testing::Case;
using testing::Communicators;
using testing::errors_of_ranks;
using testing::expect_as_made_anew;
using testing::expect_same_parts;
using testing::forward_exactly;
using testing::has;
using testing::hidden_states_of;
using testing::kNumExperts;
using testing::kPatient;
using testing::kTokens;
using testing::make_communicators;
using testing::make_layer_weights;
using testing::one_rank_options;
using testing::random_placement;
using testing::rank_options;
using testing::RankCase;
using testing::run_ranks;
using testing::small_weights;

class Moves : public ::testing::TestWithParam<testing::Way> {
 protected:
  RankCase how_{.size = 3,
                .transport = GetParam().transport,
                .lend = GetParam().lend,
                .placement = random_placement(0)};
  LayerOptions options_on(const std::shared_ptr<Communicator>& communicator) const {
    return rank_options(how_, DType::kBF16, kTokens, communicator);
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Moves, ::testing::ValuesIn(testing::kWays), testing::name_of);

TEST_P(Moves, ForwardsGoOnWithTheBitsOfOneRank) {
  how_.batch_invariant = true;
  const LayerWeights weights = small_weights();
  const MoeLayer alone(weights, one_rank_options(how_, DType::kBF16));
  const Communicators comms = make_communicators(3, how_.lend, {kPatient});
  run_ranks(3, [&](int rank) {
    MoeLayer layer(weights, options_on(comms[rank]));
    for (int step = 0; step < 200; ++step) {
      const ExpertPlacement next = random_placement(1 + step / 10);
      if (step % 10 == 3) layer.start_move(next);
      if (step % 10 == 6) {
        layer.commit_move();
        EXPECT_EQ(layer.placement(), next);
      }
      const Tensor x = hidden_states_of(rank + step, (rank + step) % 4);
      ASSERT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), forward_exactly(alone, x, 0)))
          << "step " << step;
    }
    expect_as_made_anew(layer, weights, options_on(comms[rank]));
  });
}

TEST_P(Moves, GiveTheBitsOfALayerMadeAnew) {
  const LayerWeights weights = small_weights();
  const Communicators comms = make_communicators(3, how_.lend, {kPatient});
  run_ranks(3, [&](int rank) {
    MoeLayer layer(weights, options_on(comms[rank]));
    layer.start_move(random_placement(7));  // is forgotten
    for (const std::uint64_t seed : {8, 9}) {
      layer.start_move(random_placement(seed));
      layer.commit_move();
      expect_as_made_anew(layer, weights, options_on(comms[rank]));
    }
  });
}

/// With monolithic experts, whose map knows nothing of copies, and where ranks have the same
/// tokens.
TEST(MovesTest, EveryDeployment) {
  const struct {
    const char* transport;
    bool monolithic;
    Deployment deployment;
  } rows[] = {
      {"allgather_reducescatter", true, {.dp_size = 2, .expert_parallel = true}},
      {"no_ep", false, {.tp_size = 2, .expert_parallel = true}},
      {"all2all", false, {.tp_size = 2, .dp_size = 2, .expert_parallel = true}},
      {"allgather_reducescatter", false, {.tp_size = 2, .dp_size = 2, .expert_parallel = true}},
      {"all2all",
       false,
       {.tp_size = 2, .dp_size = 2, .expert_parallel = true, .sequence_parallel = true}},
  };
  const LayerWeights weights = make_layer_weights({Case{.num_experts = 8}});
  for (const auto& row : rows) {
    const int size = row.deployment.tp_size * row.deployment.dp_size;
    SCOPED_TRACE(row.transport + std::to_string(size));
    const RankCase how{.size = size,
                       .transport = row.transport,
                       .monolithic = row.monolithic,
                       .deployment = row.deployment};
    const Communicators comms = make_communicators(size, how.lend, {kPatient});
    run_ranks(size, [&](int rank) {
      const LayerOptions options = rank_options(how, DType::kBF16, kTokens, comms[rank]);
      MoeLayer layer(weights, options);
      layer.start_move(ExpertPlacement::round_robin(8, size));
      layer.commit_move();
      LayerOptions same = options;
      same.ranks.placement = layer.placement();
      const MoeLayer anew(weights, same);
      expect_same_parts(layer.packed_weights(), anew.packed_weights());
      const Tensor x = hidden_states_of(rank / row.deployment.tp_size, 4);
      EXPECT_TRUE(
          bitwise_equal(forward_exactly(layer, x, kTokens), forward_exactly(anew, x, kTokens)));
    });
  }
}

/// Tiles, scales of columns, biases, origins, zero points, global and static scales: all of it.
TEST(MovesTest, NothingOfAnExpertIsForgotten) {
  for (const NamedScheme& named : named_schemes()) {
    SCOPED_TRACE(named.name);
    Case spec;
    spec.num_experts = 4;
    spec.hidden = 160;
    spec.intermediate = 72;
    spec.scheme = named.scheme;
    spec.bias = true;
    const LayerWeights weights = make_layer_weights({spec});
    const Communicators comms = make_communicators(2, true, {kPatient});
    run_ranks(2, [&](int rank) {
      LayerOptions options = rank_options({.size = 2}, DType::kBF16, kTokens, comms[rank]);
      MoeLayer layer(weights, options);
      layer.start_move(ExpertPlacement(4, 2, {3, 2, 1, 0}, {0, 1, 0, 1}));
      layer.commit_move();
      options.ranks.placement = layer.placement();
      const MoeLayer anew(weights, options);
      expect_same_parts(layer.packed_weights(), anew.packed_weights());
    });
  }
}

TEST_P(Moves, ThatCannotBeAreRefusedOnAllRanksAndChangeNothing) {
  const testing::TemporaryDirectory folder;
  const LayerWeights weights = small_weights();
  const ExpertPlacement wanted = random_placement(1);
  const ExpertPlacement other_counts(kNumExperts, 3, {0, 1, 2, 3, 4, 5, 0, 1},
                                     {0, 1, 2, 0, 1, 2, 0, 0});
  const Communicators comms = make_communicators(3, how_.lend, {kPatient});
  run_ranks(3, [&](int rank) {
    const auto path = folder / ("packed" + std::to_string(rank));
    LayerOptions options = options_on(comms[rank]);
    MoeLayer(weights, options).save_packed(path);
    // Nobody may write to what rank 1 has mapped.
    options.packed_weights = {path, rank == 1 ? FileAccess::kMap : FileAccess::kRead};
    MoeLayer layer(weights, options);
    const Tensor x = hidden_states_of(rank, 3);
    const Tensor before = forward_exactly(layer, x, kTokens);
    const auto refused = [&](const ExpertPlacement& placement) {
      return testing::error_text([&] { layer.start_move(placement); });
    };
    const std::string mapped = refused(wanted);
    EXPECT_TRUE(has(mapped, "rank 1: packed is mapped from a file")) << mapped;
    const std::string counts = refused(other_counts);
    EXPECT_TRUE(has(counts, "placement: was 4 experts on rank 0; must be 3")) << counts;
    const std::string alone = refused(ExpertPlacement::linear(kNumExperts, 2));
    EXPECT_TRUE(has(alone, "6 experts on 2 ranks")) << alone;
    EXPECT_TRUE(has(testing::error_text([&] { layer.commit_move(); }), "nothing to commit"));
    EXPECT_EQ(layer.placement(), how_.placement);
    EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), before));
  });
}

TEST_P(Moves, RanksMustWantTheSame) {
  const Communicators comms = make_communicators(3, how_.lend, {kPatient});
  run_ranks(3, [&](int rank) {
    MoeLayer layer(small_weights(), options_on(comms[rank])),
        second(small_weights(), options_on(comms[rank]));
    const std::string places =
        testing::error_text([&] { layer.start_move(random_placement(rank == 1 ? 4 : 3)); });
    EXPECT_TRUE(has(places, "the ranks of a layer differ in placement: ")) << places;
    const std::string layers =
        testing::error_text([&] { (rank == 1 ? second : layer).start_move(random_placement(3)); });
    EXPECT_TRUE(has(layers, "differ in layer: ranks 0, 2 have 0, rank 1 has 1")) << layers;
    layer.start_move(random_placement(3));
    layer.commit_move();
    expect_as_made_anew(layer, small_weights(), options_on(comms[rank]));
  });
}

TEST_P(Moves, ComeBetweenTwoForwards) {
  const Communicators comms = make_communicators(3, how_.lend, {kPatient});
  run_ranks(3, [&](int rank) {
    MoeLayer layer(small_weights(), options_on(comms[rank]));
    layer.start_move(random_placement(3));
    const Tensor x = hidden_states_of(rank, 3), output = Tensor::empty(x.shape(), x.dtype());
    const testing::Scratch scratch(layer, kTokens);
    {
      MoeLayer::Step step = layer.begin(x, output, scratch.workspace);
      EXPECT_TRUE(has(testing::error_text([&] { layer.commit_move(); }), "a step has begun"));
      step.compute();
      step.finish();
      layer.commit_move();
    }
    expect_as_made_anew(layer, small_weights(), options_on(comms[rank]));
  });
}

TEST_P(Moves, ARankThatDidNotCommitIsNamed) {
  const Communicators comms = make_communicators(3, how_.lend, {kPatient});
  const auto errors = errors_of_ranks(3, [&](int rank) {
    MoeLayer layer(small_weights(), options_on(comms[rank]));
    layer.start_move(random_placement(3));
    if (rank != 1) layer.commit_move();
    forward_exactly(layer, hidden_states_of(rank, 3), kTokens);
  });
  for (const std::string& error : errors) {
    EXPECT_TRUE(has(error, "placement 1, exact sizes, but rank 1 is at step 0 of layer 0") &&
                has(error, "placement 0, exact sizes"))
        << error;
  }
}

/// Ranks with the same tokens only add sums.
TEST(MovesTest, ARankThatDidNotCommitIsNamedWhereSumsAreAdded) {
  for (const bool lend : {true, false}) {
    const RankCase how{.size = 2,
                       .transport = "no_ep",
                       .lend = lend,
                       .deployment = Deployment{.tp_size = 2, .expert_parallel = true}};
    const Communicators comms = make_communicators(2, lend, {kPatient});
    const auto errors = errors_of_ranks(2, [&](int rank) {
      MoeLayer layer(small_weights(), rank_options(how, DType::kBF16, 0, comms[rank]));
      layer.start_move(ExpertPlacement::round_robin(kNumExperts, 2));
      if (rank == 1) layer.commit_move();
      forward_exactly(layer, hidden_states_of(0, 3), kTokens);
    });
    for (const std::string& error : errors) {
      EXPECT_TRUE(has(error, "but rank 1 is at the sum of step 0 of layer 0 with placement 1"))
          << error;
    }
  }
}

/// A thread of its own brings the experts over a communicator of its own. The ranks agree on the
/// forward behind which all have theirs.
TEST_P(Moves, ExpertsAreBroughtBesideForwards) {
  how_.batch_invariant = true;
  const LayerWeights weights = small_weights();
  const MoeLayer alone(weights, one_rank_options(how_, DType::kBF16));
  const Communicators comms = make_communicators(3, how_.lend, {kPatient});
  const Communicators over = make_communicators(3, how_.lend, {kPatient});
  run_ranks(3, [&](int rank) {
    MoeLayer layer(weights, options_on(comms[rank]));
    int step = 0;
    const auto forward = [&] {
      const Tensor x = hidden_states_of(rank + step, (rank + step) % 4);
      EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), forward_exactly(alone, x, 0)));
      ++step;
    };
    for (std::uint64_t move = 1; move < 4; ++move) {
      std::atomic<bool> is_here{false};
      std::jthread mover([&] {
        EXPECT_EQ(
            testing::error_text([&] { layer.start_move(random_placement(move), *over[rank]); }),
            "no error");
        is_here = true;
      });
      for (bool all_here = false; !all_here;) {
        forward();
        const auto texts = comms[rank]->gather(is_here ? "here" : "not yet", "move");
        all_here = std::ranges::count(texts, "here") == 3;
      }
      mover.join();
      layer.commit_move();
      EXPECT_EQ(layer.placement(), random_placement(move));
      forward();
    }
    expect_as_made_anew(layer, weights, options_on(comms[rank]));
  });
}

/// Rank 1 joins the move when rank 0 has been refused all else.
TEST(MovesTest, NothingElseChangesWhileExpertsAreBrought) {
  const Communicators comms = make_communicators(2, true, {kPatient});
  const Communicators over = make_communicators(2, true, {kPatient});
  run_ranks(2, [&](int rank) {
    MoeLayer layer(small_weights(), rank_options({.size = 2}, DType::kBF16, kTokens, comms[rank]));
    const ExpertPlacement placement = ExpertPlacement::round_robin(kNumExperts, 2);
    if (rank == 1) comms[rank]->gather("", "refused");
    std::jthread mover([&] {
      const auto move = [&] { layer.start_move(placement, *over[rank]); };
      EXPECT_EQ(testing::error_text(move), "no error");
    });
    if (rank == 0) {
      const auto commit = [&] { layer.commit_move(); };
      while (!has(testing::error_text(commit), "comes while start_move() brings experts")) {
        std::this_thread::yield();
      }
      const auto repack = [&] { layer.repack(small_weights().experts, 0); };
      EXPECT_TRUE(has(testing::error_text(repack), "repack() comes while"));
      comms[rank]->gather("", "refused");
    }
    mover.join();
    layer.commit_move();
  });
}

TEST(MovesTest, AreBroughtOverTheSameRanks) {
  const Communicators comms = make_communicators(2, true, {kPatient});
  const Communicators over = make_communicators(2, true, {kPatient});
  run_ranks(2, [&](int rank) {
    MoeLayer layer(small_weights(), rank_options({.size = 2}, DType::kBF16, kTokens, comms[rank]));
    const ExpertPlacement placement = ExpertPlacement::round_robin(kNumExperts, 2);
    const auto error = [&](Communicator& ranks) {
      return testing::error_text([&] { layer.start_move(placement, ranks); });
    };
    EXPECT_TRUE(has(error(*comms[rank]), "over: was the layer's communicator"));
    EXPECT_TRUE(has(error(*over[1 - rank]), "the same rank"));
    layer.start_move(placement, *over[rank]);
    layer.commit_move();
  });
}

/// Those of ranks that read each other's memory may have none. All goes on.
TEST(MovesTest, BetweenRanksNeedADataPlane) {
  const Communicators comms = make_communicators(2, true, {kPatient});
  const Communicators over = testing::communicators_without_data(2);
  const LayerWeights weights = small_weights();
  run_ranks(2, [&](int rank) {
    const LayerOptions options = rank_options({.size = 2}, DType::kBF16, kTokens, comms[rank]);
    MoeLayer layer(weights, options);
    const ExpertPlacement before = *layer.placement();
    layer.start_move(before, *over[rank]);  // nothing goes to another rank
    layer.commit_move();
    const std::string error = testing::error_text(
        [&] { layer.start_move(ExpertPlacement::round_robin(kNumExperts, 2), *over[rank]); });
    EXPECT_TRUE(has(error, "without a data plane; must be one with it, for experts that go to"))
        << error;
    EXPECT_EQ(layer.placement(), before);
    over[rank]->barrier();
    expect_as_made_anew(layer, weights, options);
  });
}

TEST(MovesTest, NeedExpertsThatAreSharedAndCanMove) {
  MoeLayer alone(small_weights(), one_rank_options({}, DType::kBF16));
  EXPECT_FALSE(alone.placement());
  EXPECT_TRUE(has(testing::error_text([&] { alone.start_move(random_placement(1)); }),
                  "start_move() needs a layer whose experts are shared"));
  const Communicators comms = make_communicators(2, true, {kPatient});
  run_ranks(2, [&](int rank) {
    const RankCase how{.size = 2, .experts = "reference"};
    MoeLayer layer(small_weights(), rank_options(how, DType::kBF16, kTokens, comms[rank]));
    const std::string error = testing::error_text(
        [&] { layer.start_move(ExpertPlacement::round_robin(kNumExperts, 2)); });
    EXPECT_TRUE(has(error, "reference cannot move experts")) << error;
  });
}

/// More experts than leave a rank at a time.
TEST(MovesTest, ManyExpertsMoveAndAreBoundAgain) {
  constexpr std::int64_t kMany = 44;
  const LayerWeights weights = make_layer_weights({Case{.num_experts = kMany}});
  std::vector<std::int32_t> swapped, ranks;
  for (std::int32_t e = 0; e < kMany; ++e) {
    swapped.push_back(e);
    ranks.push_back(e < kMany / 2 ? 1 : 0);
  }
  const Communicators comms = make_communicators(2, true, {kPatient});
  const Communicators again = make_communicators(2, true, {kPatient});
  run_ranks(2, [&](int rank) {
    const RankCase how{.size = 2};
    MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, comms[rank]));
    layer.start_move({kMany, 2, swapped, ranks});
    layer.commit_move();
    expect_as_made_anew(layer, weights, rank_options(how, DType::kBF16, kTokens, comms[rank]));
    layer.rebind(again[rank], ExpertPlacement::linear(kMany, 2));
    expect_as_made_anew(layer, weights, rank_options(how, DType::kBF16, kTokens, again[rank]));
  });
}

}  // namespace fusedmoe::moves_test
