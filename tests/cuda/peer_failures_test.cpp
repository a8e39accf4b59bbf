// What goes wrong on a rank whose rows go through the memory of its GPU is an Error of all ranks,
// at the deadline at the latest, in replays too; the GPUs work on.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <stdexcept>

#include "../ranks/leaks.h"
#include "../unit/error_text.h"
#include "fusedmoe/wait_hook.h"
#include "moe/peer_memory.h"
#include "moving_layers.h"

namespace fusedmoe::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Long enough to make layers on four GPUs before it passes.
constexpr milliseconds kDeadline{2500};

class PeerFailuresTest : public CudaTest {};

/// Ranks with two layers, each rank with a stream of its own.
struct RanksWithStreams {
  PeerRanks ranks;
  std::vector<std::unique_ptr<MoeLayer>> first, second;
  std::vector<PeerBuffers> buffers;
  std::vector<OwnedStream> streams;

  RanksWithStreams(int size, int gpus, milliseconds timeout) : ranks(size, gpus, timeout) {
    const LayerWeights weights = make_layer_weights({small_case("bf16")});
    first = ranks.make(weights, kTokens);
    second = ranks.make(weights, kTokens);
    for (int r = 0; r < size; ++r) {
      buffers.emplace_back(*first[r], kTokens, kTokens);
      buffers[r].fill(random_tensor(DType::kBF16, {kTokens, kHidden}, 1, r));
      streams.emplace_back(first[r]->config().device);
    }
    wait_for_all(first);
    run_all(first, buffers, {});  // loads what it needs
    wait_for_all(first);
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
  /// All forward but one.
  void forward_without(int absent) const {
    for (int rank = 0; rank < ranks.size(); ++rank) {
      if (rank != absent) forward(*first[rank], rank, options(rank));
    }
  }
  /// All fail with this text, at once or soon, and so does every later forward.
  void expect_error(const std::string& text) const {
    const auto deadline = steady_clock::now() + kPatient;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      while (!ranks.communicators[rank]->peers()->has_ended() && steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
      EXPECT_NE(error(rank).find(text), std::string::npos) << error(rank);
      EXPECT_EQ(error(rank), error(0));
      EXPECT_THROW(forward(*first[rank], rank, options(rank)), Error);
    }
  }
};

/// Calls test(ranks) for two ranks on one GPU. Where there are more GPUs, also for two and for
/// `most_ranks` ranks on these.
void on_all_gpus(int most_ranks, milliseconds timeout,
                 const std::function<void(const RanksWithStreams& all)>& test) {
  for (const int gpus : gpu_counts()) {
    for (int size = 2; size <= (gpus == 1 ? 2 : most_ranks); size += 2) {
      SCOPED_TRACE(std::to_string(size) + " ranks, GPUs: " + std::to_string(gpus));
      test({size, gpus, timeout});
    }
  }
}

TEST_F(PeerFailuresTest, ARankThatDoesNotComeIsNamed) {
  on_all_gpus(4, kDeadline, [](const RanksWithStreams& all) {
    const auto begin = steady_clock::now();
    all.forward_without(1);
    all.synchronize_all();
    EXPECT_LT(steady_clock::now() - begin, kDeadline + std::chrono::seconds(1));
    all.expect_error(" waited 2500 ms for rank 1 in the dispatch of layer 0");
  });
}

TEST_F(PeerFailuresTest, ARankThatStopsBetweenThePartsIsNamed) {
  on_all_gpus(4, kDeadline, [](const RanksWithStreams& all) {
    std::vector<MoeLayer::Step> steps;
    for (int r = 0; r < all.ranks.size(); ++r) {
      const PeerBuffers& own = all.buffers[r];
      steps.push_back(all.second[r]->begin(own.x, own.output, own.scratch(), all.options(r)));
    }
    for (int r = 0; r < all.ranks.size(); ++r) {
      if (r == 1) continue;
      steps[r].compute();
      steps[r].finish();
    }
    all.synchronize_all();
    all.expect_error(" waited 2500 ms for rank 1 in the return of layer 1");
  });
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
    on_all_gpus(2, kPatient, [&](const RanksWithStreams& all) {
      std::vector<MoeLayer::Step> steps;
      for (int r = 0; r < 2; ++r) {
        const PeerBuffers& own = all.buffers[r];
        const MoeLayer& layer = *(r == 1 && each.other_layer ? all.second : all.first)[r];
        ForwardOptions how = all.options(r);
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
      all.synchronize_all();
      const std::string error = all.error(0);
      EXPECT_TRUE(has(error, each.one) || has(error, each.other)) << error;
      all.expect_error("does not match rank");
    });
  }
}

/// At once, long before the deadline.
TEST_F(PeerFailuresTest, WhoWaitsLearnsWhatAnotherRankHasThrown) {
  on_all_gpus(4, kPatient, [](const RanksWithStreams& all) {
    all.forward_without(1);
    const auto begin = steady_clock::now();
    all.ranks.communicators[1]->abort("enough");
    all.synchronize_all();
    EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(1));
    all.expect_error("rank 1: enough");
  });
}

/// Where more rows can come than the experts have room for, the host waits for the ids of all.
TEST_F(PeerFailuresTest, TheWaitHookEndsTheWaitForIds) {
  constexpr std::int64_t kMost = 8192;
  const PeerRanks ranks(4, gpu_counts().back());
  const auto layers = ranks.make(make_layer_weights({small_case("bf16")}), kMost);
  ASSERT_LT(layers[0]->workspace_bytes(kMost), layers[0]->workspace_bytes(kMost, true));
  const PeerBuffers own(*layers[0], kTokens, kMost);
  own.fill(random_tensor(DType::kBF16, own.x.shape(), 1, 1));
  static std::atomic<int> calls;
  calls = 0;
  set_wait_hook([] {
    if (++calls > 20) throw std::runtime_error("Ctrl-C");
  });
  const auto begin = steady_clock::now();
  EXPECT_THROW(layers[0]->forward(own.x, own.output, own.scratch()), std::runtime_error);
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(2));
  set_wait_hook(nullptr);
  synchronize(Stream{layers[0]->config().device});
  EXPECT_TRUE(has(ranks.communicators[1]->status(), "Ctrl-C")) << ranks.communicators[1]->status();
}

/// It has more tokens than there may be.
TEST_F(PeerFailuresTest, ARankThatThrowsBeforeItsStepIsHeardAtOnce) {
  on_all_gpus(4, kPatient, [](const RanksWithStreams& all) {
    const Tensor x = Tensor::empty({kTokens + 1, kHidden}, DType::kBF16, all.buffers[1].x.device()),
                 output = Tensor::empty(x.shape(), x.dtype(), x.device());
    all.forward_without(1);
    const auto begin = steady_clock::now();
    EXPECT_THROW(all.first[1]->forward(x, output, all.buffers[1].scratch(), all.options(1)), Error);
    all.synchronize_all();
    EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(1));
    all.expect_error("rank 1: hidden_states: was 25 tokens; must be at most 24");
  });
}

TEST_F(PeerFailuresTest, AStepThatIsThrownAwayEndsTheCommunicator) {
  on_all_gpus(4, kPatient, [](const RanksWithStreams& all) {
    all.forward_without(1);
    {
      const PeerBuffers& own = all.buffers[1];
      all.first[1]->begin(own.x, own.output, own.scratch(), all.options(1));
    }
    all.synchronize_all();
    all.expect_error("rank 1: a forward was begun and not finished");
  });
}

TEST_F(PeerFailuresTest, StepsThatOverlapAreRefused) {
  const RanksWithStreams two(2, 1, kPatient);
  const PeerBuffers& own = two.buffers[0];
  MoeLayer::Step step = two.first[0]->begin(own.x, own.output, own.scratch(), two.options(0));
  EXPECT_THROW(two.forward(*two.second[0], 0, two.options(0)), Error);
  two.expect_error("a step begins before the one before it has finished");
}

/// One replay fewer. The ranks replay side by side, some of them on one GPU.
TEST_F(PeerFailuresTest, ReplaysAreWatchedToo) {
  on_all_gpus(4, kDeadline, [](const RanksWithStreams& all) {
    std::vector<Graph> graphs;
    for (int r = 0; r < all.ranks.size(); ++r) {
      graphs.emplace_back(all.streams[r], [&] { all.forward(*all.first[r], r, all.options(r)); });
    }
    for (int i = 0; i < 100; ++i) {
      for (int r = 0; r < all.ranks.size(); ++r) graphs[r].launch(all.streams[r]);
    }
    all.synchronize_all();
    EXPECT_EQ(all.error(0), "");
    for (int r = 1; r < all.ranks.size(); ++r) graphs[r].launch(all.streams[r]);
    all.synchronize_all();
    graphs[1].launch(all.streams[1]);  // does nothing any more
    synchronize(all.streams[1]);
    all.expect_error(" waited 2500 ms for rank 0 in the dispatch of layer 0");
  });
}

TEST_F(PeerFailuresTest, AReplayOfAnotherLayerIsNamedByBothSides) {
  on_all_gpus(2, kPatient, [](const RanksWithStreams& all) {
    std::vector<Graph> graphs;
    for (int r = 0; r < 2; ++r) {
      const MoeLayer& layer = *(r == 1 ? all.second : all.first)[r];
      graphs.emplace_back(all.streams[r], [&] { all.forward(layer, r, all.options(r)); });
    }
    for (int r = 0; r < 2; ++r) graphs[r].launch(all.streams[r]);
    all.synchronize_all();
    const std::string error = all.error(0);
    EXPECT_TRUE(has(error, "rank 0 has layer 0, it layer 1") ||
                has(error, "rank 1 has layer 1, it layer 0"))
        << error;
    all.expect_error("does not match rank");
  });
}

std::size_t gpu_bytes_in_use() {
  std::size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return total - free;
}

TEST_F(PeerFailuresTest, FailuresLeakNothing) {
  expect_no_leaks(
      [](int) {
        const RanksWithStreams two(2, 1, kPatient);
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
