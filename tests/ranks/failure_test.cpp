// What goes wrong on one rank is an Error of all, within the deadline: never a hang.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <latch>

#include "fusedmoe/quant.h"
#include "rank_layers.h"

namespace fusedmoe {
namespace {

using testing::Case;
using testing::errors_of_ranks;
using testing::expect_late;
using testing::forward_exactly;
using testing::kPatient;
using testing::make_communicators;
using testing::make_hidden_states;
using testing::make_layer_weights;
using testing::rank_options;
using testing::RankCase;

constexpr std::int64_t kTokens = 4;
using Communicators = std::vector<std::shared_ptr<Communicator>>;

LayerWeights small_weights() {
  Case spec;
  spec.num_experts = 6;
  return make_layer_weights({spec});
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

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

/// Two layers on three ranks that work; then `disturb` does what it likes on rank 1, and the others
/// go on with the first.
std::vector<std::string> errors_of_steps(
    const RankCase& how, std::chrono::milliseconds timeout,
    const std::function<void(const MoeLayer& first, const MoeLayer& second, Communicator& comm)>&
        disturb) {
  const Communicators comms = make_communicators(3, how.lend, {timeout});
  const auto begin = std::chrono::steady_clock::now();
  auto errors = errors_of_ranks(3, [&](int rank) {
    const LayerOptions options = rank_options(how, DType::kBF16, kTokens, comms[rank]);
    const MoeLayer first(small_weights(), options), second(small_weights(), options);
    const Tensor x = make_hidden_states(DType::kBF16, kTokens, 64);
    forward_exactly(how, first, x, kTokens);
    if (rank == 1) return disturb(first, second, *comms[1]);
    for (int step = 0; step < 3; ++step) forward_exactly(how, first, x, kTokens);
  });
  if (timeout == kPatient) {
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << "at once";
  }
  EXPECT_EQ(errors[0], errors[2]);
  EXPECT_FALSE(errors[0].empty());
  EXPECT_THROW(comms[0]->barrier(), Error) << "the communicator has ended";
  return errors;
}

/// A way to have ranks, and whether they send as many rows as there can be.
struct FailingWay {
  testing::Way way;
  bool fixed_sizes;
};
std::vector<FailingWay> failing_ways(std::initializer_list<bool> fixed_sizes) {
  std::vector<FailingWay> ways;
  for (const bool fixed : fixed_sizes) {
    for (const testing::Way& way : testing::kWays) ways.push_back({way, fixed});
  }
  return ways;
}
std::string name_of(const ::testing::TestParamInfo<FailingWay>& info) {
  return testing::name_of({info.param.way, info.index}) + (info.param.fixed_sizes ? "_fixed" : "");
}

class Failures : public ::testing::TestWithParam<FailingWay> {
 protected:
  /// The start of an Error at the first step that waits for other ranks.
  std::string first_wait(int step) const {
    return (how_.lend ? "dispatch" : "counts") + (" of step " + std::to_string(step)) +
           " of layer 0: ";
  }
  RankCase how_{.size = 3,
                .transport = GetParam().way.transport,
                .lend = GetParam().way.lend,
                .fixed_sizes = GetParam().fixed_sizes};
  Tensor x_ = make_hidden_states(DType::kBF16, kTokens, 64);
};
INSTANTIATE_TEST_SUITE_P(Ranks, Failures, ::testing::ValuesIn(failing_ways({false, true})),
                         name_of);

/// Fixed sizes have room for all rows.
class FullBuffers : public Failures {};
INSTANTIATE_TEST_SUITE_P(Ranks, FullBuffers, ::testing::ValuesIn(failing_ways({false})), name_of);

TEST_P(Failures, ARankThatIsGone) {
  expect_late(first_wait(1) + "rank 1 did not arrive", {0}, [&](auto timeout) {
    return errors_of_steps(how_, timeout, [](auto&, auto&, auto&) {});
  });
}

TEST_P(Failures, ARankWithOneCallFewer) {
  expect_late(first_wait(2) + "rank 1 did not arrive", {0}, [&](auto timeout) {
    return errors_of_steps(how_, timeout, [&](auto& first, auto&, auto&) {
      forward_exactly(how_, first, x_, kTokens);
    });
  });
}

/// It learns so when it wakes.
TEST_P(Failures, ARankThatSleeps) {
  expect_late(first_wait(1) + "rank 1 did not arrive", {0, 1}, [&](auto timeout) {
    return errors_of_steps(how_, timeout, [&](auto& first, auto&, auto&) {
      std::this_thread::sleep_for(timeout + std::chrono::milliseconds(300));
      forward_exactly(how_, first, x_, kTokens);
    });
  });
}

TEST_P(Failures, ARankInAnotherLayer) {
  const auto errors = errors_of_steps(how_, kPatient, [&](auto&, auto& second, auto&) {
    forward_exactly(how_, second, x_, kTokens);
  });
  EXPECT_TRUE(has(errors[0], "layer 0")) << errors[0];
  EXPECT_TRUE(has(errors[0], "layer 1")) << errors[0];
}

TEST_P(Failures, ARankWithAnotherSizeOfStep) {
  const auto errors = errors_of_steps(how_, kPatient, [&](auto& first, auto&, auto&) {
    forward_exactly(how_, first, x_.slice(0, 0, 2), 2);
  });
  EXPECT_TRUE(has(errors[0], "at most 4 tokens") && has(errors[0], "at most 2 tokens"))
      << errors[0];
}

TEST_P(Failures, ARankWithTooManyTokens) {
  const auto errors = errors_of_steps(how_, kPatient, [&](auto& first, auto&, auto&) {
    forward_exactly(how_, first, make_hidden_states(DType::kBF16, kTokens + 1, 64), kTokens);
  });
  EXPECT_TRUE(has(errors[0], "rank 1: hidden_states: was 5 tokens; must be at most 4"))
      << errors[0];
}

TEST_P(Failures, ARankThatThrowsInsideAStep) {
  const Communicators comms = make_communicators(3, how_.lend, {kPatient});
  std::atomic<bool> armed{false};
  const auto errors = errors_of_ranks(3, [&](int rank) {
    LayerWeights weights = small_weights();
    weights.router.custom = [&, rank](const TensorView& logits, const TensorView& ids,
                                      const TensorView& factors) {
      if (rank == 1 && armed) throw std::runtime_error("no route");
      std::fill_n(ids.as<std::int32_t>(), ids.numel(), 0);
      std::fill_n(factors.as<float>(), factors.numel(), logits ? 1.0F : 0.0F);
    };
    const MoeLayer layer(std::move(weights),
                         rank_options(how_, DType::kBF16, kTokens, comms[rank]));
    forward_exactly(how_, layer, x_, kTokens);
    comms[rank]->barrier();
    armed = true;
    comms[rank]->barrier();
    forward_exactly(how_, layer, x_, kTokens);
  });
  EXPECT_EQ(errors[1], "no route");
  EXPECT_EQ(errors[0], "rank 1: no route");
  EXPECT_EQ(errors[2], errors[0]);
}

/// Runs tasks one by one; throws at a call if it is told to.
class FailingExecutor final : public Executor {
 public:
  int concurrency() const override { return 2; }
  void run(int num_tasks, Task task) override {
    if (calls++ == fails_at) throw std::runtime_error("a core is gone");
    for (int i = 0; i < num_tasks; ++i) task(i);
  }
  int calls = 0, fails_at = -1;
};

/// Between prepare and finalize, too: wherever a forward has work for several cores.
TEST_P(Failures, ARankThatThrowsAtAnyPlaceOfAStep) {
  constexpr std::int64_t kMany = 40;
  Case spec;
  spec.num_experts = 6;
  spec.hidden = 1024;
  const LayerWeights weights = make_layer_weights({spec});
  const Tensor x = make_hidden_states(DType::kBF16, kMany, spec.hidden);
  int calls = 1;
  for (int fails_at = 0; fails_at < calls; ++fails_at) {
    const Communicators comms = make_communicators(3, how_.lend, {kPatient});
    const auto errors = errors_of_ranks(3, [&](int rank) {
      FailingExecutor executor;
      LayerOptions options = rank_options(how_, DType::kBF16, kMany, comms[rank]);
      options.num_threads = 0;
      options.executor = &executor;
      const MoeLayer layer(weights, options);
      executor.calls = 0;
      forward_exactly(how_, layer, x, kMany);
      if (rank == 1) {
        calls = executor.calls;
        executor.calls = 0;
        executor.fails_at = fails_at;
      }
      forward_exactly(how_, layer, x, kMany);
      comms[rank]->barrier();  // a rank may be done when another fails
    });
    EXPECT_EQ(errors[1], "a core is gone");
    EXPECT_TRUE(errors[0].starts_with("rank 1: ") && has(errors[0], "a core is gone")) << errors[0];
    EXPECT_EQ(errors[2], errors[0]);
  }
  EXPECT_GE(calls, 3);
}

TEST_P(FullBuffers, AreAnErrorOfAllRanks) {
  const Communicators comms = make_communicators(3, how_.lend, {kPatient});
  const auto errors = errors_of_ranks(3, [&](int rank) {
    LayerOptions options = rank_options(how_, DType::kBF16, kTokens, comms[rank]);
    options.ranks.receive_capacity = 2 * kTokens;
    const MoeLayer layer(small_weights(), options);
    const Tensor ids = Tensor::zeros({kTokens, 2}, DType::kI32);  // all on rank 0
    const Tensor factors = Tensor::zeros({kTokens, 2}, DType::kF32);
    const Routing routing{ids, factors};
    forward_exactly(how_, layer, x_.slice(0, 0, 2), kTokens, [&] {
      static thread_local Routing two;
      two = {ids.slice(0, 0, 2), factors.slice(0, 0, 2)};
      return &two;
    }());
    forward_exactly(how_, layer, x_, kTokens, &routing);
  });
  EXPECT_TRUE(has(errors[0], "receive_capacity: was 12 rows")) << errors[0];
  EXPECT_TRUE(has(errors[1], "receive_capacity")) << errors[1];
  EXPECT_TRUE(has(errors[2], "receive_capacity")) << errors[2];
}

/// The rank with all experts refuses what the others, which receive nothing, have begun to send.
TEST_P(FullBuffers, OnTheOnlyRankWithExperts) {
  how_.placement = ExpertPlacement(6, 3, {0, 1, 2, 3, 4, 5}, {2, 2, 2, 2, 2, 2});
  const Communicators comms = make_communicators(3, how_.lend, {kPatient});
  const auto errors = errors_of_ranks(3, [&](int rank) {
    LayerOptions options = rank_options(how_, DType::kBF16, kTokens, comms[rank]);
    options.ranks.receive_capacity = 1;
    const MoeLayer layer(small_weights(), options);
    forward_exactly(how_, layer, x_, kTokens);
  });
  for (const std::string& error : errors) {
    EXPECT_TRUE(has(error, "receive_capacity: was 12 rows")) << error;
  }
}

/// Ranks of tensor parallelism, which have the same tokens and only add sums.
class SumFailures : public ::testing::TestWithParam<bool> {
 protected:
  /// Rank 1 gives forward() `tokens` tokens where the others have kTokens.
  std::vector<std::string> errors_with(std::int64_t tokens) const {
    const Communicators comms = make_communicators(3, GetParam(), {kPatient});
    const auto begin = std::chrono::steady_clock::now();
    auto errors = errors_of_ranks(3, [&](int rank) {
      const RankCase how{.size = 3, .transport = "no_ep", .deployment = Deployment{.tp_size = 3}};
      const LayerOptions options = rank_options(how, DType::kBF16, 0, comms[rank]);
      Case spec;
      spec.intermediate = 96;
      const LayerWeights weights = make_layer_weights({spec});
      const MoeLayer layer(local_weights(weights, options.parallel), options);
      const auto step = [&](std::int64_t count) {
        forward_exactly(layer, make_hidden_states(DType::kBF16, count, 64), count);
      };
      step(kTokens);
      step(rank == 1 ? tokens : kTokens);
    });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    EXPECT_EQ(errors[0], errors[1]);
    EXPECT_EQ(errors[0], errors[2]);
    return errors;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, SumFailures, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "lending" : "messages");
});

TEST_P(SumFailures, ARankWithAnotherNumberOfTokens) {
  for (const std::int64_t tokens : {2, 3, 5, 500}) {
    const std::string error = errors_with(tokens)[0];
    if (GetParam()) {
      EXPECT_TRUE(has(error, "rank 0 is at the sum of step 1 of layer 0 with num_tokens 4,"))
          << error;
      EXPECT_TRUE(has(error, "but rank 1 is at the sum of step 1 of layer 0 with num_tokens " +
                                 std::to_string(tokens)))
          << error;
    } else {
      // Unless a share has as many rows, which only the headers tell.
      EXPECT_TRUE(has(error, "bytes from rank") || has(error, "num_tokens 4,")) << error;
    }
  }
}

/// It waits for no rows, and the others would wait for its own.
TEST_P(SumFailures, ARankWithoutTokens) {
  const auto errors = errors_with(0);
  EXPECT_TRUE(has(errors[0], "but rank 1 is at the sum of step 1 of layer 0 with num_tokens 0"))
      << errors[0];
}

TEST(FailuresTest, AHundredLayersFailAndAreMadeAgain) {
  for (int round = 0; round < 100; ++round) {
    const Communicators comms = make_thread_communicators(2, {kPatient});
    const auto errors = errors_of_ranks(2, [&](int rank) {
      const MoeLayer layer(small_weights(), rank_options({}, DType::kBF16, kTokens, comms[rank]));
      const Tensor x = make_hidden_states(DType::kBF16, 1, 64);
      forward_exactly(layer, x, kTokens);
      if (rank == round % 2) return comms[rank]->abort("once more");
      forward_exactly(layer, x, kTokens);
    });
    EXPECT_TRUE(has(errors[1 - round % 2], "once more")) << errors[1 - round % 2];
  }
}

}  // namespace
}  // namespace fusedmoe
