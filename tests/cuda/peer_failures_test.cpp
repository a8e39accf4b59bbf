// What goes wrong on a rank whose rows go through the memory of its GPU is an Error of all ranks,
// at the deadline at the latest, in replays too; the GPUs work on.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "../ranks/leaks.h"
#include "../unit/error_text.h"
#include "moe/peer_memory.h"
#include "moving_layers.h"

namespace fusedmoe::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kDeadline{400};

class PeerFailuresTest : public CudaTest {};

/// Two ranks on one GPU with two layers, each rank with a stream of its own.
struct TwoRanks {
  PeerRanks ranks;
  std::vector<std::unique_ptr<MoeLayer>> first, second;
  std::vector<PeerBuffers> buffers;
  std::vector<OwnedStream> streams;

  explicit TwoRanks(milliseconds timeout = kDeadline) : ranks(2, 1, timeout) {
    const LayerWeights weights = make_layer_weights({small_case("bf16")});
    first = ranks.make(weights, kTokens);
    second = ranks.make(weights, kTokens);
    for (int r = 0; r < 2; ++r) {
      buffers.emplace_back(*first[r], kTokens, kTokens);
      buffers[r].fill(random_tensor(DType::kBF16, {kTokens, kHidden}, 1, r));
      streams.emplace_back(kGpu);
    }
    synchronize(Stream{kGpu});
    run_all(first, buffers, {});  // loads what it needs
    synchronize(Stream{kGpu});
  }
  ForwardOptions options(int rank, std::int64_t most = kTokens) const {
    ForwardOptions result;
    result.stream = streams[rank];
    result.max_tokens = most;
    return result;
  }
  void forward(const MoeLayer& layer, int rank, const ForwardOptions& how) const {
    layer.forward(buffers[rank].x, buffers[rank].output, buffers[rank].scratch(), how);
  }
  void synchronize_all() const {
    for (const OwnedStream& stream : streams) synchronize(stream);
  }
  /// What a rank throws when it is asked.
  std::string error(int rank) const {
    try {
      ranks.communicators[rank]->check();
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  }
  /// Both fail with this text, at once or soon, and so does every later forward.
  void expect_error(const std::string& text) const {
    const auto deadline = steady_clock::now() + kPatient;
    for (int rank = 0; rank < 2; ++rank) {
      while (!ranks.communicators[rank]->peers()->has_ended() && steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
      EXPECT_NE(error(rank).find(text), std::string::npos) << error(rank);
      EXPECT_EQ(error(rank), error(0));
      EXPECT_THROW(forward(*first[rank], rank, options(rank)), Error);
    }
  }
};

TEST_F(PeerFailuresTest, ARankThatDoesNotComeIsNamed) {
  const TwoRanks two;
  const auto begin = steady_clock::now();
  two.forward(*two.first[0], 0, two.options(0));
  synchronize(two.streams[0]);
  EXPECT_LT(steady_clock::now() - begin, kDeadline + std::chrono::seconds(1));
  two.expect_error("rank 0 waited 400 ms for rank 1 in the dispatch of layer 0");
}

TEST_F(PeerFailuresTest, ARankThatStopsBetweenThePartsIsNamed) {
  const TwoRanks two;
  std::vector<MoeLayer::Step> steps;
  for (int r = 0; r < 2; ++r) {
    const PeerBuffers& own = two.buffers[r];
    steps.push_back(two.second[r]->begin(own.x, own.output, own.scratch(), two.options(r)));
  }
  steps[0].compute();
  steps[0].finish();
  synchronize(two.streams[0]);
  two.expect_error("rank 0 waited 400 ms for rank 1 in the return of layer 1");
}

TEST_F(PeerFailuresTest, AnotherLayerOrSizeIsNamedByBothSides) {
  struct Case {
    bool other_layer;
    std::int64_t most;
    const char *one, *other;
  };
  for (const Case& each :
       {Case{true, kTokens, "rank 0 has layer 0, it layer 1", "rank 1 has layer 1, it layer 0"},
        Case{false, kTokens - 1, "at most 24 tokens, it at most 23 tokens",
             "at most 23 tokens, it at most 24 tokens"}}) {
    const TwoRanks two(kPatient);
    std::vector<MoeLayer::Step> steps;
    for (int r = 0; r < 2; ++r) {
      const PeerBuffers& own = two.buffers[r];
      const MoeLayer& layer = *(r == 1 && each.other_layer ? two.second : two.first)[r];
      ForwardOptions how = two.options(r);
      TensorView x = own.x, output = own.output;
      if (r == 1) {
        how.max_tokens = each.most;
        x = x.slice(0, 0, 5);
        output = output.slice(0, 0, 5);
      }
      steps.push_back(layer.begin(x, output, own.scratch(), how));
    }
    for (MoeLayer::Step& step : steps) step.compute();
    for (MoeLayer::Step& step : steps) step.finish();
    two.synchronize_all();
    const std::string error = two.error(0);
    EXPECT_TRUE(error.find(each.one) != std::string::npos ||
                error.find(each.other) != std::string::npos)
        << error;
    two.expect_error("does not match rank");
  }
}

/// At once, long before the deadline.
TEST_F(PeerFailuresTest, WhoWaitsLearnsWhatAnotherRankHasThrown) {
  const TwoRanks two(kPatient);
  two.forward(*two.first[0], 0, two.options(0));
  const auto begin = steady_clock::now();
  two.ranks.communicators[1]->abort("enough");
  synchronize(two.streams[0]);
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(2));
  two.expect_error("rank 1: enough");
}

/// It has more tokens than there may be.
TEST_F(PeerFailuresTest, ARankThatThrowsBeforeItsStepIsHeardAtOnce) {
  const TwoRanks two(kPatient);
  const Tensor x = Tensor::empty({kTokens + 1, kHidden}, DType::kBF16, kGpu),
               output = Tensor::empty(x.shape(), x.dtype(), kGpu);
  two.forward(*two.first[0], 0, two.options(0));
  const auto begin = steady_clock::now();
  EXPECT_THROW(two.first[1]->forward(x, output, two.buffers[1].scratch(), two.options(1)), Error);
  synchronize(two.streams[0]);
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(1));
  two.expect_error("rank 1: hidden_states: was 25 tokens; must be at most 24");
}

TEST_F(PeerFailuresTest, AStepThatIsThrownAwayEndsTheCommunicator) {
  const TwoRanks two(kPatient);
  two.forward(*two.first[0], 0, two.options(0));
  {
    const PeerBuffers& own = two.buffers[1];
    two.first[1]->begin(own.x, own.output, own.scratch(), two.options(1));
  }
  two.synchronize_all();
  two.expect_error("rank 1: a forward was begun and not finished");
}

TEST_F(PeerFailuresTest, StepsThatOverlapAreRefused) {
  const TwoRanks two(kPatient);
  const PeerBuffers& own = two.buffers[0];
  MoeLayer::Step step = two.first[0]->begin(own.x, own.output, own.scratch(), two.options(0));
  EXPECT_THROW(two.forward(*two.second[0], 0, two.options(0)), Error);
  two.expect_error("a step begins before the one before it has finished");
}

/// One replay fewer. The ranks replay side by side on one GPU.
TEST_F(PeerFailuresTest, ReplaysAreWatchedToo) {
  const TwoRanks two(milliseconds(2000));
  std::vector<Graph> graphs;
  for (int r = 0; r < 2; ++r) {
    graphs.emplace_back(two.streams[r], [&] { two.forward(*two.first[r], r, two.options(r)); });
  }
  for (int i = 0; i < 100; ++i) {
    for (int r = 0; r < 2; ++r) graphs[r].launch(two.streams[r]);
  }
  two.synchronize_all();
  EXPECT_EQ(two.error(0), "");
  graphs[1].launch(two.streams[1]);
  synchronize(two.streams[1]);
  graphs[1].launch(two.streams[1]);  // does nothing any more
  synchronize(two.streams[1]);
  two.expect_error("rank 1 waited 2000 ms for rank 0 in the dispatch of layer 0");
}

TEST_F(PeerFailuresTest, AReplayOfAnotherLayerIsNamedByBothSides) {
  const TwoRanks two(kPatient);
  std::vector<Graph> graphs;
  for (int r = 0; r < 2; ++r) {
    const MoeLayer& layer = *(r == 1 ? two.second : two.first)[r];
    graphs.emplace_back(two.streams[r], [&] { two.forward(layer, r, two.options(r)); });
  }
  for (int r = 0; r < 2; ++r) graphs[r].launch(two.streams[r]);
  two.synchronize_all();
  const std::string error = two.error(0);
  EXPECT_TRUE(has(error, "rank 0 has layer 0, it layer 1") ||
              has(error, "rank 1 has layer 1, it layer 0"))
      << error;
  two.expect_error("does not match rank");
}

std::size_t gpu_bytes_in_use() {
  std::size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return total - free;
}

TEST_F(PeerFailuresTest, FailuresLeakNothing) {
  expect_no_leaks(
      [](int) {
        const TwoRanks two(kPatient);
        two.forward(*two.first[0], 0, two.options(0));
        two.ranks.communicators[1]->abort("enough");
        two.synchronize_all();
        EXPECT_NE(two.error(0), "");
      },
      100, gpu_bytes_in_use);
}

/// One rank has no block, or all map all blocks and drop them.
TEST_F(PeerFailuresTest, BlocksThatAreNotMappedLeakNothing) {
  const PeerRanks ranks(2);
  expect_no_leaks(
      [&](int round) {
        const int fails = round % 3;
        run_ranks(2, [&](int rank) {
          std::shared_ptr<PeerBlocks> blocks;
          const auto bytes = [&]() -> std::size_t {
            if (rank == fails) throw Error::communication("no block");
            return std::size_t{1} << 26;
          };
          const std::string why = ranks.communicators[rank]->map_blocks(bytes, blocks);
          EXPECT_EQ(why, fails < 2 ? "rank " + std::to_string(fails) + ": no block" : "");
          EXPECT_EQ(blocks != nullptr, fails == 2);
        });
      },
      100, gpu_bytes_in_use);
}

/// Rank 1 breaks off at any one of its copies.
TEST_F(PeerFailuresTest, MovesThatFailLeakNothing) {
  const WatchedRuntime watched(DeviceKind::kCuda);
  const PeerRanks ranks(2);
  const auto layers = ranks.make(make_layer_weights({small_case("bf16")}), kTokens);
  const int copies = copies_of_move(layers, 1);
  expect_no_leaks(
      [&](int round) {
        run_ranks(2, [&](int rank) {
          if (rank == 1) WatchedRuntime::calls.copies_until_error = round % copies;
          const std::string error =
              error_text([&] { layers[rank]->start_move(other_than_linear()); });
          WatchedRuntime::calls = {};
          EXPECT_EQ(error, "rank 1: the device is broken");
        });
      },
      100, gpu_bytes_in_use);
}

}  // namespace
}  // namespace fusedmoe::testing
