// What goes wrong on one rank is an Error of all, within the deadline: never a hang.
#include <gtest/gtest.h>

#include <atomic>

#include "error_text.h"
#include "rank_layers.h"

namespace fusedmoe::failure_test {

using testing::Case;
using testing::Communicators;
using testing::errors_of_ranks;
using testing::expect_late;
using testing::forward_exactly;
using testing::has;
using testing::kAtOnce;
using testing::kPatient;
using testing::make_communicators;
using testing::make_hidden_states;
using testing::make_layer_weights;
using testing::rank_options;
using testing::RankCase;
using testing::small_weights;

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kTokens = 4;

/// Two layers on three ranks that work; then `disturb` does what it likes on rank 1, and the others
/// go on with the first.
std::vector<std::string> errors_of_steps(
    const RankCase& how, std::chrono::milliseconds timeout,
    const std::function<void(const MoeLayer& first, const MoeLayer& second, Communicator& comm)>&
        disturb) {
  const Communicators comms = make_communicators(3, how.lend, {timeout});
  Clock::time_point begin;  // of what rank 1 does
  auto errors = errors_of_ranks(3, [&](int rank) {
    const LayerOptions options = rank_options(how, DType::kBF16, kTokens, comms[rank]);
    const MoeLayer first(small_weights(), options), second(small_weights(), options);
    const Tensor x = make_hidden_states(DType::kBF16, kTokens, 64);
    forward_exactly(how, first, x, kTokens);
    if (rank == 1) {
      begin = Clock::now();
      return disturb(first, second, *comms[1]);
    }
    for (int step = 0; step < 3; ++step) forward_exactly(how, first, x, kTokens);
  });
  if (timeout == kPatient) {
    EXPECT_LT(Clock::now() - begin, kAtOnce);
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

/// Between prepare and finalize, too: wherever a forward has work for several cores. What writes
/// results is then done by the rank's own thread, and nothing fails.
TEST_P(Failures, ARankThatThrowsAtAnyPlaceOfAStep) {
  constexpr std::int64_t kMany = 40;
  Case spec;
  spec.num_experts = 6;
  spec.hidden = 1024;
  const LayerWeights weights = make_layer_weights({spec});
  const Tensor x = make_hidden_states(DType::kBF16, kMany, spec.hidden);
  int calls = 1, failed = 0;
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
    if (errors[1].empty()) {
      EXPECT_GT(fails_at, 0);
      EXPECT_EQ(errors, std::vector<std::string>(3));
      continue;
    }
    ++failed;
    EXPECT_EQ(errors[1], "a core is gone");
    EXPECT_TRUE(errors[0].starts_with("rank 1: ") && has(errors[0], "a core is gone")) << errors[0];
    EXPECT_EQ(errors[2], errors[0]);
  }
  EXPECT_GE(failed, 2);
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
    Clock::time_point begin;  // of rank 1's other step
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
      if (rank == 1) begin = Clock::now();
      step(rank == 1 ? tokens : kTokens);
    });
    EXPECT_LT(Clock::now() - begin, kAtOnce);
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

}  // namespace fusedmoe::failure_test
