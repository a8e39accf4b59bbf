// Layers whose rows go through the memory of the GPUs: on one GPU, and on all that there are.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "launches.h"
#include "moe/peer_memory.h"
#include "peer_ranks.h"

namespace fusedmoe::testing {
namespace {

class PeerMemoryTest : public CudaTest {};

TEST_F(PeerMemoryTest, RanksGiveTheOutputOfOneGpu) {
  for (const int gpus : gpu_counts()) {
    for (const int size : {2, 4, 8}) {
      const PeerRanks ranks(size, gpus);
      ranks.reserve(std::size_t{32} << 20);
      for (const char* scheme : {"bf16", "fp8_block", "mxfp4_w4a16", "w4a8", "nvfp4"}) {
        const LayerWeights weights = make_layer_weights({small_case(scheme)});
        const MoeLayer alone(weights, options_of(kGpu, false));
        const MoeLayer exact(weights, options_of(kGpu, true));
        for (const char* transport : {"all2all", "allgather_reducescatter"}) {
          for (const bool batch_invariant : {false, true}) {
            SCOPED_TRACE(std::to_string(size) + " on " + std::to_string(gpus) + " " + scheme + " " +
                         transport + (batch_invariant ? " per slot" : ""));
            const auto layers =
                ranks.make(weights, kTokens, batch_invariant, [&](int, LayerOptions& options) {
                  options.require = experts_under_test() + "+" + transport;
                });
            EXPECT_TRUE(rows_travel_by_peers(*layers[0])) << rows_travel(*layers[0]);
            std::vector<PeerBuffers> buffers;
            std::vector<Tensor> inputs;
            for (int r = 0; r < size; ++r) {
              const std::int64_t tokens = tokens_of(r);
              inputs.push_back(random_tensor(DType::kBF16, {tokens, kHidden}, 1, 70 + r));
              buffers.emplace_back(*layers[r], tokens, kTokens);
              buffers[r].fill(inputs[r]);
            }
            for (const bool fixed_sizes : {false, true}) {
              ForwardOptions options;
              options.max_tokens = kTokens;
              options.fixed_sizes = fixed_sizes;
              run_all(layers, buffers, options);
              wait_for_all(layers);
              for (int r = 0; r < size; ++r) {
                ranks.communicators[r]->check();
                const Tensor expected = forward(batch_invariant ? exact : alone, inputs[r], 0);
                expect_as_one(to_host(buffers[r].output), expected, batch_invariant, r);
              }
            }
          }
        }
      }
    }
  }
}

/// The number of a step is in device memory, not in the kernels' arguments. So replays of a graph
/// and steps without a graph can follow each other.
TEST_F(PeerMemoryTest, ReplaysGiveTheBitsOfOtherSteps) {
  constexpr int kInputs = 4, kReplays = 1000;
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const int size : {2, 4, 8}) {
    for (const bool batch_invariant : {false, true}) {
      SCOPED_TRACE(std::to_string(size) + (batch_invariant ? " per slot" : ""));
      const PeerRanks ranks(size);
      const auto layers = ranks.make(weights, kTokens, batch_invariant);
      const OwnedStream stream(kGpu);
      ForwardOptions options;
      options.stream = stream;
      options.max_tokens = kTokens;
      std::vector<PeerBuffers> buffers;
      std::vector<std::vector<Tensor>> inputs(kInputs), expected(kInputs);
      for (int r = 0; r < size; ++r) buffers.emplace_back(*layers[r], tokens_of(r), kTokens);
      const auto fill = [&](int input) {
        for (int r = 0; r < size; ++r) copy(inputs[input][r], buffers[r].x, stream);
      };
      for (int i = 0; i < kInputs; ++i) {
        for (int r = 0; r < size; ++r) {
          inputs[i].push_back(
              to_gpu(random_tensor(DType::kBF16, buffers[r].x.shape(), 1, 8 * i + r)));
        }
        fill(i);
        run_all(layers, buffers, options);
        synchronize(stream);
        for (int r = 0; r < size; ++r) expected[i].push_back(to_host(buffers[r].output));
      }
      const Graph graph(stream, [&] { run_all(layers, buffers, options); });
      for (int i = 0; i < kReplays; ++i) {
        fill(i % kInputs);
        i % 50 == 49 ? run_all(layers, buffers, options) : graph.launch(stream);
        if (i % 37 != 0 && i != kReplays - 1) continue;
        synchronize(stream);
        for (int r = 0; r < size; ++r) {
          ranks.communicators[r]->check();
          EXPECT_TRUE(bitwise_equal(to_host(buffers[r].output), expected[i % kInputs][r]));
        }
      }
    }
  }
}

/// A layer on two ranks, whose first steps have loaded all that they need.
struct LoadedLayer {
  LoadedLayer() : layers(ranks.make(make_layer_weights({small_case("bf16")}), kTokens)) {
    for (int r = 0; r < 2; ++r) buffers.emplace_back(*layers[r], tokens_of(r), kTokens);
    options.stream = stream;
    options.max_tokens = kTokens;
    run_all(layers, buffers, options);
    run_all(layers, buffers, options, true);
    synchronize(stream);
  }
  const MoeLayer& layer() const { return *layers[0]; }
  const PeerBuffers& own() const { return buffers[0]; }

  const PeerRanks ranks{2};
  const std::vector<std::unique_ptr<MoeLayer>> layers;
  std::vector<PeerBuffers> buffers;
  const OwnedStream stream{kGpu};
  ForwardOptions options;
};

/// With nothing between compute and finish, the kernel that sums also tells that the experts have
/// ended.
TEST_F(PeerMemoryTest, AForwardIsOneLaunchLessThanItsParts) {
  const LoadedLayer loaded;
  const PeerBuffers& own = loaded.own();
  const Launches whole(loaded.stream, [&] {
    loaded.layer().forward(own.x, own.output, own.scratch(), loaded.options);
  });
  const Launches parts(loaded.stream, [&] {
    MoeLayer::Step step = loaded.layer().begin(own.x, own.output, own.scratch(), loaded.options);
    step.compute();
    step.finish();
  });
  EXPECT_EQ(whole.all + 1, parts.all);
}

/// Rows are shown while the router's kernel chooses; with the caller's ids nothing of ours is
/// before.
TEST_F(PeerMemoryTest, RowsAreShownWhileTheRouterChooses) {
  const LoadedLayer loaded;
  const PeerBuffers& own = loaded.own();
  const Launches routes(loaded.stream, [&] {
    loaded.layer().forward(own.x, own.output, own.scratch(), loaded.options);
  });
  const Launches routed(loaded.stream, [&] {
    loaded.layer().forward_routed(own.x, {own.ids, own.weights}, own.output, own.scratch(),
                                  loaded.options);
  });
  EXPECT_EQ(routes.early, routed.early + 1);
}

/// Each rank has a graph on a stream of its own, as ranks on several GPUs have. There the kernels
/// of a step follow each other at once, so one may begin while the one before still runs. A forward
/// in one piece tells its results in another kernel than one in parts; the ranks need not do the
/// same.
TEST_F(PeerMemoryTest, ReplaysOnAStreamForEachRankGiveTheBitsOfOtherSteps) {
  constexpr int kSize = 2, kInputs = 4, kReplays = 1000;
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const struct {
    std::int64_t tokens;
    bool in_parts[kSize];
  } rows[] = {
      {1, {false, false}}, {kTokens, {false, false}}, {1, {true, true}}, {kTokens, {true, false}}};
  for (const auto& [tokens, in_parts] : rows) {
    const PeerRanks ranks(kSize, gpu_counts().back());
    const auto layers = ranks.make(weights, tokens);
    std::vector<PeerBuffers> buffers;
    std::vector<OwnedStream> streams;
    std::vector<Graph> graphs;
    std::vector<std::vector<Tensor>> inputs(kSize), expected(kSize), outputs(kSize);
    for (int r = 0; r < kSize; ++r) {
      const Device device = layers[r]->config().device;
      buffers.emplace_back(*layers[r], tokens, tokens);
      streams.emplace_back(device);
      for (int i = 0; i < kInputs; ++i) {
        inputs[r].push_back(
            to_device(random_tensor(DType::kBF16, buffers[r].x.shape(), 1, 8 * i + r), device));
      }
      for (int i = 0; i < kReplays; ++i) {
        outputs[r].push_back(Tensor::empty(buffers[r].x.shape(), DType::kBF16, device));
      }
    }
    ForwardOptions options;
    options.max_tokens = tokens;
    options.fixed_sizes = true;
    for (int i = 0; i < kInputs; ++i) {
      for (int r = 0; r < kSize; ++r) buffers[r].fill(inputs[r][i]);
      run_all(layers, buffers, options);
      wait_for_all(layers);
      for (int r = 0; r < kSize; ++r) expected[r].push_back(to_host(buffers[r].output));
    }
    for (int r = 0; r < kSize; ++r) {
      options.stream = streams[r];
      graphs.emplace_back(streams[r], [&, is_whole = !in_parts[r]] {
        const PeerBuffers& own = buffers[r];
        if (is_whole) return layers[r]->forward(own.x, own.output, own.scratch(), options);
        MoeLayer::Step step = layers[r]->begin(own.x, own.output, own.scratch(), options);
        step.compute();
        step.finish();
      });
    }
    for (int i = 0; i < kReplays; ++i) {
      for (int r = 0; r < kSize; ++r) {
        copy(inputs[r][i % kInputs], buffers[r].x, streams[r]);
        graphs[r].launch(streams[r]);
        copy(buffers[r].output, outputs[r][i], streams[r]);
      }
    }
    for (int r = 0; r < kSize; ++r) {
      synchronize(streams[r]);
      ranks.communicators[r]->check();
      for (int i = 0; i < kReplays; ++i) {
        ASSERT_TRUE(bitwise_equal(to_host(outputs[r][i]), expected[r][i % kInputs]))
            << tokens << " tokens, rank " << r << ", replay " << i;
      }
    }
  }
}

/// Sizes say where the parts of a step lie. While rank 1 has not added the results of a small step,
/// rank 0 publishes a large one, also in rank 1's arena.
TEST_F(PeerMemoryTest, AStepOfAnotherSizeLeavesResultsThatAreNotAddedYet) {
  constexpr int kSize = 2;
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const bool batch_invariant : {false, true}) {
    SCOPED_TRACE(batch_invariant ? "per slot" : "per rank");
    const PeerRanks ranks(kSize, gpu_counts().back());
    const auto layers = ranks.make(weights, kTokens, batch_invariant);
    std::vector<PeerBuffers> small, large;
    std::vector<OwnedStream> streams;
    for (int r = 0; r < kSize; ++r) {
      small.emplace_back(*layers[r], 1, kTokens);
      large.emplace_back(*layers[r], kTokens, kTokens);
      streams.emplace_back(layers[r]->config().device);
      for (const PeerBuffers& each : {small[r], large[r]}) {
        each.fill(
            to_device(random_tensor(DType::kBF16, each.x.shape(), 1, 90 + r), each.x.device()));
      }
    }
    ForwardOptions options;
    options.fixed_sizes = true;
    options.max_tokens = 1;
    run_all(layers, small, options);
    wait_for_all(layers);
    const std::vector<Tensor> expected{to_host(small[0].output), to_host(small[1].output)};

    const auto begin = [&](int r, const std::vector<PeerBuffers>& buffers, std::int64_t most) {
      options.stream = streams[r];
      options.max_tokens = most;
      const PeerBuffers& own = buffers[r];
      MoeLayer::Step step = layers[r]->begin(own.x, own.output, own.scratch(), options);
      step.compute();
      return step;
    };
    MoeLayer::Step first = begin(0, small, 1), late = begin(1, small, 1);
    const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
    ASSERT_EQ(cudaLaunchHostFunc(static_cast<cudaStream_t>(Stream(streams[1]).handle), sleep, {}),
              cudaSuccess);
    first.finish();
    MoeLayer::Step second = begin(0, large, kTokens);
    late.finish();
    MoeLayer::Step last = begin(1, large, kTokens);
    second.finish();
    last.finish();
    for (int r = 0; r < kSize; ++r) {
      synchronize(streams[r]);
      ranks.communicators[r]->check();
      EXPECT_TRUE(bitwise_equal(to_host(small[r].output), expected[r])) << "rank " << r;
    }
  }
}

/// For experts that leave what they compute in one place.
TEST_F(PeerMemoryTest, RowsThatWereLeftInOnePlaceGoWhereTheyAreAdded) {
  constexpr std::int64_t kEach = 5, kRows = 2 * kEach;
  for (const std::int64_t columns : {264, 90, 7}) {
    const PeerRanks ranks(2);
    ranks.reserve(std::size_t{1} << 20);
    const Tensor rows = random_tensor(DType::kBF16, {kRows, columns}, 1, 3);
    Tensor ids = Tensor::empty({kRows, 2}, DType::kI32);
    std::vector<Tensor> wanted, there;
    for (int t = 0; t < 2; ++t) wanted.push_back(Tensor::zeros({kEach, columns}, DType::kBF16));
    for (std::int64_t row = 0; row < kRows; ++row) {
      const bool is_local = row % 3 != 1;  // experts 0 and 1 are
      ids.as<std::int32_t>()[2 * row] = row % 2 == 0 ? -1 : 3;
      ids.as<std::int32_t>()[2 * row + 1] = is_local ? 1 : 2;
      if (!is_local) continue;
      copy(rows.slice(0, row, row + 1), wanted[row / kEach].slice(0, row % kEach, row % kEach + 1),
           {});
    }
    const Tensor rows_there = to_gpu(rows), ids_there = to_gpu(ids);
    const Tensor failed = Tensor::zeros({1}, DType::kI32, kGpu);
    RowTargets targets;
    targets.rows_each = kEach;
    targets.failed = failed.as<const std::uint32_t>();
    for (int t = 0; t < 2; ++t) {
      there.push_back(Tensor::zeros({kEach, columns}, DType::kBF16, kGpu));
      targets.rows[t] = there.back().as<std::byte>();
    }
    ranks.communicators[0]->peers()->leave({rows_there, ids_there, TensorView(), 2}, targets,
                                           Stream{kGpu});
    for (int t = 0; t < 2; ++t) EXPECT_TRUE(bitwise_equal(to_host(there[t]), wanted[t])) << t;
  }
}

/// All tokens choose the experts of one rank, where there is room for twice their mean. With fewer
/// tokens, rows of GEMM 2 in fp32 would take more room than what passes save.
TEST_F(PeerMemoryTest, MoreExpertRowsThanThereIsRoomForTakeSeveralPasses) {
  const struct {
    const char* scheme;
    int ranks;
    std::int64_t most, hidden;
    int missing;  // tokens of each rank after the first
  } cases[] = {{"bf16", 4, 8192, kHidden, 1},
               // The last pass has one row, which the kernel of one token must not take.
               {"fp8_block", 3, 2731, 2048, 0}};
  for (const auto& [scheme, size, most, hidden, missing] : cases) {
    SCOPED_TRACE(scheme);
    Case spec = small_case(scheme);
    spec.hidden = hidden;
    const LayerWeights weights = make_layer_weights({spec});
    const MoeLayer alone(weights, options_of(kGpu, false));
    const PeerRanks ranks(size);
    const auto layers = ranks.make(weights, most, false, [](int, LayerOptions& options) {
      options.ranks.dispatch_dtype = DType::kBF16;
    });
    EXPECT_LT(layers[0]->workspace_bytes(most), layers[0]->workspace_bytes(most, true));
    std::vector<PeerBuffers> buffers;
    for (int r = 0; r < size; ++r) {
      const std::int64_t tokens = most - r * missing;
      buffers.emplace_back(*layers[r], tokens, most);
      buffers[r].fill(random_tensor(DType::kBF16, {tokens, hidden}, 1, 70 + r));
      const Tensor ids = Tensor::empty({tokens, 4}, DType::kI32);
      for (std::int64_t i = 0; i < ids.numel(); ++i) {
        ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(i % 4);  // linear: 0 1 2 3 | ...
      }
      copy(ids, buffers[r].ids, Stream{kGpu});
      copy(random_tensor(DType::kF32, ids.shape(), 1, r), buffers[r].weights, Stream{kGpu});
    }
    run_all(layers, buffers, {}, true);
    synchronize(Stream{kGpu});
    for (int r = 0; r < size; ++r) {
      const PeerBuffers& own = buffers[r];
      const Tensor output = Tensor::empty(own.x.shape(), own.x.dtype(), kGpu);
      const PeerBuffers scratch(alone, most, most);
      alone.forward_routed(own.x, {own.ids, own.weights}, output, scratch.scratch());
      expect_as_one(to_host(own.output), to_host(output), false, r);
      const auto last_row = [&](const Tensor& rows) {  // which the whole would hide
        const Tensor host = to_host(rows);
        return Tensor(host.slice(0, host.size(0) - 1, host.size(0)), host.owner());
      };
      expect_as_one(last_row(own.output), last_row(output), false, r);
    }
  }
}

}  // namespace
}  // namespace fusedmoe::testing
