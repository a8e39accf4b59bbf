// Experts of GPUs that move between ranks while the layer serves, and layers that survivors bind
// again: the bits stay those of one GPU, also in graphs that were recorded before. Ranks share a
// GPU, or have one each where there are several.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../inside/watched_runtime.h"
#include "../ranks/same_parts.h"
#include "../unit/error_text.h"
#include "peer_ranks.h"
#include "testing/random.h"

namespace fusedmoe::testing {
namespace {

constexpr std::int64_t kExperts = 13;

class CudaMovesTest : public CudaTest {};

/// Any order of the experts, and of copies of the first three, on 2, 4 or 8 ranks.
ExpertPlacement random_placement(int size, std::uint64_t seed) {
  std::vector<std::int32_t> experts, ranks;
  for (std::int32_t i = 0; i < 16; ++i) {
    experts.push_back(i % static_cast<std::int32_t>(kExperts));
    ranks.push_back(i % size);
  }
  Random random(seed);
  for (std::size_t i = experts.size(); i > 1; --i) {
    std::swap(experts[i - 1], experts[static_cast<std::size_t>(random.below(i))]);
  }
  return {kExperts, size, experts, ranks};
}

/// As many experts on each rank as with ExpertPlacement::linear(13, 2).
ExpertPlacement other_than_linear() {
  std::vector<std::int32_t> experts, ranks;
  for (std::int32_t e = 0; e < kExperts; ++e) {
    experts.push_back(e);
    ranks.push_back(e < 6 ? 1 : 0);
  }
  return {kExperts, 2, experts, ranks};
}

LayerOptions options_on(const std::shared_ptr<Communicator>& communicator, bool batch_invariant,
                        const char* pair = "sm90+all2all") {
  LayerOptions options = options_of(communicator->device(), batch_invariant);
  options.require = pair;
  options.ranks.communicator = communicator;
  options.ranks.max_tokens_per_rank = kTokens;
  return options;
}

Tensor input_of(int rank, int step) {
  return random_tensor(DType::kBF16, {tokens_of(rank), kHidden}, 1, 100 * step + rank);
}

/// What a layer of these options holds and computes is what a new one does.
void expect_as_made_anew(const MoeLayer& layer, const LayerWeights& weights, LayerOptions options) {
  options.ranks.placement = layer.placement();
  const MoeLayer anew(weights, options);
  expect_same_parts(layer.packed_weights(), anew.packed_weights());
  const Tensor x = input_of(options.ranks.communicator->rank(), 90);
  EXPECT_TRUE(bitwise_equal(forward(layer, x, kTokens), forward(anew, x, kTokens)));
}

TEST_F(CudaMovesTest, ForwardsGoOnWithTheBitsOfOneGpu) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const Setting& setting : all_settings()) {
    for (const char* pair : {"sm90+all2all", "sm90+allgather_reducescatter", "sm80+all2all"}) {
      SCOPED_TRACE(setting.name() + " " + pair);
      Ranks ranks(setting);
      run_ranks(setting.size, [&](int rank) {
        const auto communicator = ranks.join(rank);
        const bool exact = std::string(pair).starts_with("sm90");
        LayerOptions options = options_on(communicator, exact, pair);
        options.ranks.placement = random_placement(setting.size, 0);
        LayerOptions of_one = options_of(communicator->device(), exact);
        of_one.require = std::string(pair).substr(0, 4);
        const MoeLayer alone(weights, of_one);
        MoeLayer layer(weights, options);
        for (int step = 0; step < 9; ++step) {
          if (step % 3 == 1) layer.start_move(random_placement(setting.size, step));
          const Tensor x = input_of(rank, step);
          const Tensor output = forward(layer, x, kTokens), expected = forward(alone, x, 0);
          if (exact) {
            EXPECT_TRUE(bitwise_equal(output, expected)) << step;
          } else {
            EXPECT_LE(compare(output, expected).max_norm_relative, kTolerance) << step;
          }
          if (step % 3 == 2) layer.commit_move();
        }
        expect_as_made_anew(layer, weights, options);
        communicator->barrier();
      });
    }
  }
}

/// A move, and then the loss of a rank.
TEST_F(CudaMovesTest, OfSchemesWithAllKindsOfParts) {
  for (const char* scheme : {"fp8_block", "fp8_tensor_static", "mxfp4_w4a16", "nvfp4", "w4a8"}) {
    for (const char* pair : {"sm90+all2all", "sm80+all2all"}) {
      SCOPED_TRACE(std::string(scheme) + " " + pair);
      Case spec = small_case(scheme);
      spec.bias = true;
      const LayerWeights weights = make_layer_weights({spec});
      const CommunicatorOptions patient{kPatient, kGpu};
      const auto all = make_thread_communicators(4, patient),
                 left = make_thread_communicators(3, patient);
      run_ranks(4, [&](int rank) {
        LayerOptions options = options_on(all[rank], false, pair);
        options.ranks.placement = random_placement(4, 0);
        MoeLayer layer(weights, options);
        layer.start_move(random_placement(4, 1));
        layer.commit_move();
        expect_as_made_anew(layer, weights, options);
        all[rank]->barrier();
        if (rank == 3) return;
        layer.rebind(left[rank], ExpertPlacement::round_robin(kExperts, 3), source_of(weights));
        options.ranks.communicator = left[rank];
        expect_as_made_anew(layer, weights, options);
      });
    }
  }
}

/// Experts of a rank that has failed are nowhere, unless somebody gives them; one rank is left.
TEST_F(CudaMovesTest, TheLastSurvivorHasALayerOfOneGpu) {
  const LayerWeights weights = make_layer_weights({small_case("fp8_block")});
  const CommunicatorOptions patient{kPatient, kGpu};
  const auto both = make_thread_communicators(2, patient);
  const auto left = make_thread_communicators(1, patient);
  run_ranks(2, [&](int rank) {
    MoeLayer layer(weights, options_on(both[rank], false));
    if (rank == 1) return both[1]->abort("gone");
    const ExpertPlacement all = ExpertPlacement::linear(kExperts, 1);
    EXPECT_NE(error_text([&] { layer.rebind(left[0], all); }).find("placement has expert 7"),
              std::string::npos);
    layer.rebind(left[0], all, source_of(weights));
    const MoeLayer alone(weights, options_of(kGpu, false));
    expect_same_parts(layer.packed_weights(), alone.packed_weights());
    EXPECT_TRUE(
        bitwise_equal(forward(layer, input_of(0, 1), kTokens), forward(alone, input_of(0, 1), 0)));
  });
}

TEST_F(CudaMovesTest, AMoveThatBreaksOffLeavesTheOldPlacement) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const CommunicatorOptions patient{kPatient, kGpu};
  const auto control = make_thread_control_plane();
  const auto planes = make_thread_data_planes(2, kGpu);
  const auto again = make_thread_communicators(2, patient);
  run_ranks(2, [&](int rank) {
    std::shared_ptr<DataPlane> plane = planes[rank];
    if (rank == 1) plane = std::make_shared<Breaking>(std::move(plane));
    const auto all = std::make_shared<Communicator>(rank, 2, control, std::move(plane), patient);
    const MoeLayer alone(weights, options_of(kGpu, true));
    MoeLayer layer(weights, options_on(all, true));
    std::string error;
    try {
      layer.start_move(other_than_linear());
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    EXPECT_NE(error.find("the cable is cut"), std::string::npos) << error;
    EXPECT_EQ(layer.placement(), ExpertPlacement::linear(kExperts, 2));
    layer.rebind(again[rank], *layer.placement());
    const Tensor x = input_of(rank, 1);
    EXPECT_TRUE(bitwise_equal(forward(layer, x, kTokens), forward(alone, x, 0)));
  });
}

/// The next forward would wait for cudaMalloc and cudaFree.
TEST_F(CudaMovesTest, ACommitTakesAndFreesNoMemory) {
  const LayerWeights weights = make_layer_weights({small_case("fp8_block")});
  const WatchedRuntime watched(DeviceKind::kCuda);
  const auto all = make_thread_communicators(2, CommunicatorOptions{kPatient, kGpu});
  run_ranks(2, [&](int rank) {
    LayerOptions options = options_on(all[rank], false);
    options.ranks.placement = random_placement(2, 0);
    MoeLayer layer(weights, options);
    for (const std::uint64_t seed : {1, 2, 3}) {
      layer.start_move(random_placement(2, seed));
      RuntimeCalls& calls = WatchedRuntime::calls;
      calls = {};
      layer.commit_move();
      EXPECT_EQ(calls.taken + calls.freed + calls.streams + calls.events, 0);
      EXPECT_EQ(calls.device_waits, 1) << "for forwards that read what is overwritten";
      EXPECT_EQ(calls.waits, 1) << "for the copies";
    }
    expect_as_made_anew(layer, weights, options);
    all[rank]->barrier();
  });
}

TEST_F(CudaMovesTest, ACommitThatFailsHalfWayEndsTheLayer) {
  const LayerWeights weights = make_layer_weights({small_case("fp8_block")});
  for (const int copies : {0, 2, 5}) {
    const WatchedRuntime watched(DeviceKind::kCuda);
    const auto all = make_thread_communicators(2, CommunicatorOptions{kPatient, kGpu});
    run_ranks(2, [&](int rank) {
      MoeLayer layer(weights, options_on(all[rank], false));
      layer.start_move(other_than_linear());
      all[rank]->barrier();
      if (rank == 1) WatchedRuntime::calls.copies_until_error = copies;
      const std::string error = error_text([&] { layer.commit_move(); });
      WatchedRuntime::calls.copies_until_error = -1;
      EXPECT_EQ(error.find("the device is broken") != std::string::npos, rank == 1) << error;
      const std::string next = error_text([&] { forward(layer, input_of(rank, 1), kTokens); });
      EXPECT_NE(next.find("rank 1: the device is broken"), std::string::npos) << next;
    });
  }
}

/// FUSEDMOE_TEST_TIMES: prints how much longer 50 replays take with a commit between them, of eight
/// experts each way as deepseek-v3 has them, through peer memory on two GPUs. Takes 3 GB of memory.
TEST_F(CudaMovesTest, TellsHowLongACommitTakes) {
  if (!std::getenv("FUSEDMOE_TEST_TIMES") || !all_settings().back().peers) GTEST_SKIP();
  constexpr std::int64_t kAll = 16, kMost = 8;
  constexpr int kRuns = 9, kReplays = 50;
  Case spec;
  spec.num_experts = kAll;
  spec.topk = 8;
  spec.hidden = 7168;
  spec.intermediate = 2048;
  spec.scheme = parse_scheme("fp8_block");
  const LayerWeights weights = make_layer_weights({spec});
  std::vector<std::int32_t> experts, ranks_of;
  for (std::int32_t e = 0; e < kAll; ++e) {
    experts.push_back(e);
    ranks_of.push_back(e < kAll / 2 ? 1 : 0);
  }
  const ExpertPlacement linear = ExpertPlacement::linear(kAll, 2),
                        swapped(kAll, 2, experts, ranks_of);
  Ranks ranks({2, true, true});
  run_ranks(2, [&](int rank) {
    const auto communicator = ranks.join(rank);
    LayerOptions options = options_on(communicator, false);
    options.ranks.max_tokens_per_rank = kMost;
    MoeLayer layer(weights, options);
    const PeerBuffers own(layer, kMost, kMost);
    own.fill(random_tensor(DType::kBF16, own.x.shape(), 1, rank));
    const OwnedStream stream(communicator->device());
    ForwardOptions forward;
    forward.stream = stream;
    forward.max_tokens = kMost;
    forward.fixed_sizes = true;
    const auto run = [&] { layer.forward(own.x, own.output, own.scratch(), forward); };
    run();
    synchronize(stream);
    const Graph graph(stream, run);
    using Clock = std::chrono::steady_clock;
    const auto ms_since = [](Clock::time_point begin) {
      return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
    };
    std::vector<double> without, with, calls, moves;
    const auto replay = [&](bool commits) {
      communicator->barrier();
      const Clock::time_point begin = Clock::now();
      for (int i = 0; i < kReplays; ++i) {
        if (commits && i == kReplays / 2) {
          synchronize(stream);
          const Clock::time_point call = Clock::now();
          layer.commit_move();
          calls.push_back(ms_since(call));
        }
        graph.launch(stream);
      }
      synchronize(stream);
      return ms_since(begin);
    };
    for (int i = 0; i < kRuns; ++i) {
      const Clock::time_point begin = Clock::now();
      layer.start_move(i % 2 == 0 ? swapped : linear);
      moves.push_back(ms_since(begin));
      without.push_back(replay(false));
      with.push_back(replay(true));
    }
    for (std::vector<double>* all : {&without, &with, &calls, &moves}) std::ranges::sort(*all);
    const auto median = [](const std::vector<double>& all) { return all[all.size() / 2]; };
    std::printf(
        "rank %d: %d replays %.2f ms, with a commit %.2f ms (%.2f to %.2f), the call %.2f, the "
        "move %.1f\n",
        rank, kReplays, median(without), median(with), with.front(), with.back(), median(calls),
        median(moves));
    communicator->check();
    communicator->barrier();
  });
}

/// Graphs hold addresses. What has changed when they are replayed, they must find there: weights,
/// maps, and also that ids have become others than those of the placement that was recorded.
class PeersAndGraph {
 public:
  explicit PeersAndGraph(const LayerWeights& weights, bool batch_invariant)
      : ranks_(2), layers_(ranks_.make(weights, kTokens, batch_invariant)) {
    for (int r = 0; r < 2; ++r) buffers_.emplace_back(*layers_[r], tokens_of(r), kTokens);
    options_.stream = stream_;
    options_.max_tokens = kTokens;
    run_all(layers_, buffers_, options_);  // loads what it needs
    synchronize(stream_);
    graph_.emplace(stream_, [&] { run_all(layers_, buffers_, options_); });
  }
  MoeLayer& layer(int rank) { return *layers_[rank]; }
  const Communicator& communicator(int rank) const { return *ranks_.communicators[rank]; }
  void start_move(const ExpertPlacement& placement) {
    run_ranks(2, [&](int rank) { layers_[rank]->start_move(placement); });
  }
  void replay(int step) {
    for (int r = 0; r < 2; ++r) buffers_[r].fill(input_of(r, step));
    synchronize(Stream{kGpu});
    graph_->launch(stream_);
    synchronize(stream_);
  }
  Tensor output(int rank) const { return to_host(buffers_[rank].output); }

 private:
  PeerRanks ranks_;
  std::vector<std::unique_ptr<MoeLayer>> layers_;
  std::vector<PeerBuffers> buffers_;
  OwnedStream stream_{kGpu};
  ForwardOptions options_;
  std::optional<Graph> graph_;
};

TEST_F(CudaMovesTest, GraphsOfPeersServeOnWhenExpertsHaveMoved) {
  for (const char* scheme : {"bf16", "fp8_block"}) {
    const LayerWeights weights = make_layer_weights({small_case(scheme)});
    for (const bool batch_invariant : {false, true}) {
      SCOPED_TRACE(std::string(scheme) + (batch_invariant ? " per slot" : ""));
      const MoeLayer alone(weights, options_of(kGpu, batch_invariant));
      PeersAndGraph peers(weights, batch_invariant);
      const ExpertPlacement linear = ExpertPlacement::linear(kExperts, 2);
      for (int step = 0; step < 8; ++step) {
        if (step % 3 == 1) peers.start_move(step == 1 ? other_than_linear() : linear);
        peers.replay(step);
        for (int r = 0; r < 2; ++r) {
          peers.communicator(r).check();
          const Tensor expected = forward(alone, input_of(r, step), 0);
          if (batch_invariant) {
            EXPECT_TRUE(bitwise_equal(peers.output(r), expected)) << step;
          } else {
            EXPECT_LE(compare(peers.output(r), expected).max_norm_relative, kTolerance) << step;
          }
        }
        for (int r = 0; step % 3 == 2 && r < 2; ++r) peers.layer(r).commit_move();
      }
    }
  }
}

TEST_F(CudaMovesTest, ReplaysNameARankThatDidNotCommit) {
  PeersAndGraph peers(make_layer_weights({small_case("bf16")}), false);
  peers.start_move(other_than_linear());
  peers.replay(0);
  peers.communicator(0).check();
  peers.layer(0).commit_move();
  peers.replay(1);
  for (int r = 0; r < 2; ++r) {
    const std::string error = error_text([&] { peers.communicator(r).check(); });
    EXPECT_TRUE(error.find("placement 1, it placement 0") != std::string::npos ||
                error.find("placement 0, it placement 1") != std::string::npos)
        << error;
  }
}

TEST_F(CudaMovesTest, GraphsOfMessagesServeOnWhenExpertsHaveMoved) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const Setting& setting : settings()) {
    if (!setting.nccl || setting.size != 2) continue;
    for (const char* pair : {"sm90+all2all", "sm90+allgather_reducescatter"}) {
      SCOPED_TRACE(pair);
      Ranks ranks(setting);
      run_ranks(2, [&](int rank) {
        const auto communicator = ranks.join(rank);
        const Device device = communicator->device();
        const MoeLayer alone(weights, options_of(device, false));
        MoeLayer layer(weights, options_on(communicator, false, pair));
        const PeerBuffers own(layer, tokens_of(rank), kTokens);
        const OwnedStream stream(device);
        ForwardOptions options;
        options.stream = stream;
        options.max_tokens = kTokens;
        options.fixed_sizes = true;
        const auto run = [&] { layer.forward(own.x, own.output, own.scratch(), options); };
        run();
        synchronize(stream);
        const Graph graph(stream, run);
        for (int step = 0; step < 6; ++step) {
          if (step == 1) layer.start_move(other_than_linear());
          own.fill(input_of(rank, step));
          synchronize(Stream{device});
          graph.launch(stream);
          synchronize(stream);
          const Tensor expected = forward(alone, input_of(rank, step), 0);
          EXPECT_LE(compare(to_host(own.output), expected).max_norm_relative, kTolerance) << step;
          if (step == 3) layer.commit_move();
        }
        communicator->barrier();
      });
    }
  }
}

/// A thread of its own brings them over a communicator of its own; the ranks agree on the forward
/// behind which all have theirs.
TEST_F(CudaMovesTest, ExpertsAreBroughtBesideForwards) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const Setting& setting : all_settings()) {
    if (setting.size != 2) continue;
    SCOPED_TRACE(setting.name());
    Ranks ranks(setting), second({2, setting.nccl});
    run_ranks(2, [&](int rank) {
      const auto communicator = ranks.join(rank), over = second.join(rank);
      const MoeLayer alone(weights, options_of(communicator->device(), true));
      LayerOptions options = options_on(communicator, true);
      options.ranks.placement = random_placement(2, 0);
      MoeLayer layer(weights, options);
      int step = 0;
      const auto serve = [&] {
        const Tensor x = input_of(rank, step++);
        EXPECT_TRUE(bitwise_equal(forward(layer, x, kTokens), forward(alone, x, 0))) << step;
      };
      serve();
      for (std::uint64_t move = 1; move < 4; ++move) {
        std::atomic<bool> is_here{false};
        std::jthread mover([&] {
          const ExpertPlacement placement = random_placement(2, move);
          EXPECT_EQ(error_text([&] { layer.start_move(placement, *over); }), "no error");
          is_here = true;
        });
        for (bool all_here = false; !all_here;) {
          serve();
          const auto texts = communicator->gather(is_here ? "here" : "not yet", "move");
          all_here = std::ranges::count(texts, "here") == 2;
        }
        mover.join();
        layer.commit_move();
        serve();
      }
      expect_as_made_anew(layer, weights, options);
      communicator->barrier();
    });
  }
}

}  // namespace
}  // namespace fusedmoe::testing
