// What a commit of moved experts asks of the device: forwards wait for it.
#include <gtest/gtest.h>

#include <atomic>
#include <optional>

#include "../ranks/moving.h"
#include "layer/staging.h"
#include "watched_runtime.h"

namespace fusedmoe::commit_test {

using testing::Communicators;
using testing::error_text;
using testing::expect_as_made_anew;
using testing::forward_exactly;
using testing::has;
using testing::hidden_states_of;
using testing::kNumExperts;
using testing::kPatient;
using testing::kTokens;
using testing::make_communicators;
using testing::random_placement;
using testing::rank_options;
using testing::RankCase;
using testing::run_ranks;
using testing::RuntimeCalls;
using testing::small_weights;
using testing::WatchedRuntime;

/// Experts of the test are larger; what a host keeps of a placement is smaller.
constexpr std::size_t kFewest = 4096;

TEST(StagingTest, KeepsBlocksForTheNextMove) {
  const std::shared_ptr<layer::Staging> staging = layer::Staging::of({});
  EXPECT_EQ(layer::Staging::of({}), staging);
  const WatchedRuntime watched(DeviceKind::kCpu);
  RuntimeCalls& calls = WatchedRuntime::calls;
  calls = {};
  std::optional<Tensor> small = staging->take(1000), large = staging->take(5000);
  EXPECT_EQ(calls.taken, 2);
  const void *const at_small = small->data(), *const at_large = large->data();
  small.reset();
  large.reset();
  EXPECT_EQ(calls.freed, 0);
  small = staging->take(900);
  EXPECT_EQ(small->data(), at_small) << "the smallest that is large enough";
  large = staging->take(900);
  EXPECT_EQ(large->data(), at_large);
  EXPECT_EQ(calls.taken, 2);
  large.reset();
  large = staging->take(6000);
  EXPECT_EQ(calls.taken, 3);
  EXPECT_EQ(calls.freed, 1) << "none that is kept was large enough";
  large.reset();
}

/// What is kept goes with the last who has the staging, what is in use when it is no longer used.
TEST(StagingTest, BlocksOutliveIt) {
  const WatchedRuntime watched(DeviceKind::kCpu);
  WatchedRuntime::calls = {};
  std::shared_ptr<layer::Staging> staging = layer::Staging::of({});
  std::optional<Tensor> kept = staging->take(1000), used = staging->take(1000);
  kept.reset();
  EXPECT_EQ(WatchedRuntime::calls.freed, 0);
  staging.reset();
  EXPECT_EQ(WatchedRuntime::calls.freed, 1);
  used.reset();
  EXPECT_EQ(WatchedRuntime::calls.freed, 2);
}

TEST(CommitTest, TakesAndFreesNoMemoryAndWaitsOnce) {
  const WatchedRuntime watched(DeviceKind::kCpu, kFewest);
  const Communicators comms = make_communicators(3, true, {kPatient});
  std::atomic<int> taken{0};
  run_ranks(3, [&](int rank) {
    const LayerOptions options = rank_options({.size = 3, .placement = random_placement(0)},
                                              DType::kBF16, kTokens, comms[rank]);
    MoeLayer layer(small_weights(), options);
    RuntimeCalls& calls = WatchedRuntime::calls;
    for (const std::uint64_t seed : {1, 2, 3}) {
      calls = {};
      layer.start_move(random_placement(seed));
      taken += calls.taken;
      calls = {};
      layer.commit_move();
      EXPECT_EQ(calls.taken, 0);
      EXPECT_EQ(calls.freed, 0);
      EXPECT_EQ(calls.streams + calls.events, 0);
      EXPECT_EQ(calls.device_waits, 1) << "for forwards that read what is overwritten";
      EXPECT_EQ(calls.waits, 1) << "for the copies";
    }
    expect_as_made_anew(layer, small_weights(), options);
    comms[rank]->barrier();
  });
  EXPECT_GT(taken, 0) << "blocks of experts count";
}

/// Of rank 1, at each of its copies. The others hear of it in the next forward.
TEST(CommitTest, ThatFailsHalfWayEndsTheLayer) {
  for (const bool lend : {true, false}) {
    int copies = 1;  // of a commit
    for (int until_error = 0; until_error < copies; ++until_error) {
      const WatchedRuntime watched(DeviceKind::kCpu);
      const Communicators comms = make_communicators(2, lend, {kPatient});
      const Communicators again = make_communicators(2, lend, {kPatient});
      run_ranks(2, [&](int rank) {
        const RankCase how{.size = 2, .lend = lend};
        MoeLayer layer(small_weights(), rank_options(how, DType::kBF16, kTokens, comms[rank]));
        const ExpertPlacement before = ExpertPlacement::round_robin(kNumExperts, 2),
                              wanted = *layer.placement();
        RuntimeCalls& calls = WatchedRuntime::calls;
        const auto commit = [&] { layer.commit_move(); };
        layer.start_move(before);
        calls = {};
        commit();
        if (rank == 1) copies = calls.copies;
        layer.start_move(wanted);
        comms[rank]->barrier();
        calls = {};
        if (rank == 1) calls.copies_until_error = until_error;
        const std::string error = error_text(commit);
        calls.copies_until_error = -1;
        EXPECT_EQ(has(error, "the device is broken"), rank == 1) << error;
        EXPECT_EQ(calls.waits, 1) << "for the copies, before others get the memory";
        if (rank == 1) {
          EXPECT_TRUE(has(error_text(commit), "nothing to commit"));
        }
        EXPECT_EQ(layer.placement(), rank == 1 ? before : wanted);
        const auto forward = [&] { forward_exactly(layer, hidden_states_of(rank, 3), kTokens); };
        EXPECT_TRUE(has(error_text(forward), "rank 1: the device is broken"))
            << error_text(forward);
        const auto rebind = [&] { layer.rebind(again[rank], wanted); };
        const std::string refused = error_text(rebind);
        EXPECT_TRUE(has(refused, "make the layer again")) << refused;
      });
    }
    EXPECT_GT(copies, 1);
  }
}

/// Staging that fails on one rank changes nothing on any, and what was taken is there again.
TEST(CommitTest, AMoveThatCannotBeStagedLeavesTheOldPlacement) {
  const WatchedRuntime watched(DeviceKind::kCpu);
  const Communicators comms = make_communicators(3, true, {kPatient});
  run_ranks(3, [&](int rank) {
    LayerOptions options = rank_options({.size = 3, .placement = random_placement(0)}, DType::kBF16,
                                        kTokens, comms[rank]);
    MoeLayer layer(small_weights(), options);
    RuntimeCalls& calls = WatchedRuntime::calls;
    const auto expect_failure = [&](const RuntimeCalls& fault, const char* text) {
      if (rank == 1) calls = fault;
      const std::string error = error_text([&] { layer.start_move(random_placement(1)); });
      calls = {};
      EXPECT_TRUE(has(error, "rank 1: ") && has(error, text)) << error;
      EXPECT_EQ(layer.placement(), random_placement(0));
    };
    expect_failure({.is_full = true}, "memory");
    layer.start_move(random_placement(1));
    const std::string of_each = comms[rank]->gather(std::to_string(calls.copies), "copies")[1];
    for (int copies = 0; copies < std::stoi(of_each); ++copies) {
      expect_failure({.copies_until_error = copies}, "the device is broken");
    }
    EXPECT_NE(of_each, "0");
    expect_as_made_anew(layer, small_weights(), options);
    layer.start_move(random_placement(1));
    layer.commit_move();
    expect_as_made_anew(layer, small_weights(), options);
    comms[rank]->barrier();
  });
}

}  // namespace fusedmoe::commit_test
