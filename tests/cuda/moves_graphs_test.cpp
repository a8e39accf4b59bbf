// Experts of GPUs that move between ranks under graphs that were recorded before, and how long
// these wait for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../unit/error_text.h"
#include "moving_layers.h"

namespace fusedmoe::testing {
namespace {

class CudaMovesGraphsTest : public CudaTest {};

/// FUSEDMOE_TEST_TIMES: prints how much longer 50 replays take with a commit between them, of eight
/// experts each way as deepseek-v3 has them, through peer memory on two GPUs; and how much longer
/// 500 replays take beside the move. Takes 3 GB of memory.
TEST_F(CudaMovesGraphsTest, TellsHowLongACommitTakes) {
  if (!std::getenv("FUSEDMOE_TEST_TIMES") || !all_settings().back().peers) {
    GTEST_SKIP() << "times, which FUSEDMOE_TEST_TIMES asks for, of peer memory";
  }
  constexpr std::int64_t kAll = 16, kMost = 8;
  constexpr int kRuns = 9, kReplays = 50, kBeside = 500;
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
  Ranks ranks({2, true, true}), second({2, true, true});
  run_ranks(2, [&](int rank) {
    const auto communicator = ranks.join(rank), over = second.join(rank);
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
    std::vector<double> without, with, calls, moves, alone, beside;
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
      for (std::vector<double>* times : {&alone, &beside}) {
        communicator->barrier();
        std::jthread mover;
        if (times == &beside) {
          mover = std::jthread([&] { layer.start_move(i % 2 == 0 ? linear : swapped, *over); });
        }
        const Clock::time_point start = Clock::now();
        for (int replays = 0; replays < kBeside; ++replays) graph.launch(stream);
        synchronize(stream);
        times->push_back(ms_since(start));
      }
    }
    for (std::vector<double>* all : {&without, &with, &calls, &moves, &alone, &beside}) {
      std::ranges::sort(*all);
    }
    const auto median = [](const std::vector<double>& all) { return all[all.size() / 2]; };
    std::printf(
        "rank %d: %d replays %.2f ms, with a commit %.2f ms (%.2f to %.2f), the call %.2f, the "
        "move %.1f; %d replays %.2f ms, beside a move %.2f (%.2f to %.2f)\n",
        rank, kReplays, median(without), median(with), with.front(), with.back(), median(calls),
        median(moves), kBeside, median(alone), median(beside), beside.front(), beside.back());
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

TEST_F(CudaMovesGraphsTest, GraphsOfPeersServeOnWhenExpertsHaveMoved) {
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

TEST_F(CudaMovesGraphsTest, ReplaysNameARankThatDidNotCommit) {
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

TEST_F(CudaMovesGraphsTest, GraphsOfMessagesServeOnWhenExpertsHaveMoved) {
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

}  // namespace
}  // namespace fusedmoe::testing
