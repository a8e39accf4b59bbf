// Lanes: two micro-batches in flight, each on a stream of its own, whose rows or sums go through
// the memory of the GPUs.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../ranks/same_parts.h"
#include "../unit/error_text.h"
#include "moe/peer_memory.h"
#include "peer_ranks.h"
#include "rank_processes.h"

namespace fusedmoe::testing {
namespace {

constexpr int kLanes = 2;

class PeerLanesTest : public CudaTest {};

/// Different ones for each forward, rank and lane.
Tensor input_of(const Shape& shape, int forward, int rank, int lane) {
  return random_tensor(DType::kBF16, shape, 1, 100 * forward + 10 * rank + lane);
}

/// Two lanes of a layer on ranks that share a GPU.
class TwoLanes {
 public:
  TwoLanes(int size, const LayerWeights& weights, const PeerRanks::Options& set,
           bool batch_invariant = false)
      : ranks(size),
        layers(ranks.make(weights, kTokens, batch_invariant,
                          [&](int rank, LayerOptions& options) {
                            options.ranks.lanes = kLanes;
                            set(rank, options);
                          })),
        buffers(kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      streams.emplace_back(kGpu);
      for (int r = 0; r < size; ++r) {
        const bool same = layers[r]->config().parallel.dp_size == 1;
        buffers[lane].emplace_back(*layers[r], same ? kTokens : tokens_of(r + lane), kTokens);
      }
    }
  }

  ForwardOptions options(int lane) const {
    ForwardOptions result;
    result.max_tokens = kTokens;
    result.lane = lane;
    result.stream = streams[lane];
    return result;
  }
  void fill(int forward) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int r = 0; r < ranks.size(); ++r) {
        const bool same = layers[r]->config().parallel.dp_size == 1;
        const Tensor& x = buffers[lane][r].x;
        buffers[lane][r].fill(input_of(x.shape(), forward, same ? 0 : r, lane));
      }
    }
    synchronize(Stream{kGpu});
  }
  /// Both are begun before any is computed, and computed before any is finished.
  void run_together() {
    std::vector<MoeLayer::Step> steps;
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int r = 0; r < ranks.size(); ++r) {
        const PeerBuffers& own = buffers[lane][r];
        steps.push_back(layers[r]->begin(own.x, own.output, own.scratch(), options(lane)));
      }
    }
    for (MoeLayer::Step& step : steps) step.compute();
    for (MoeLayer::Step& step : steps) step.finish();
  }
  void run_one_by_one() {
    for (int lane = 0; lane < kLanes; ++lane) run_all(layers, buffers[lane], options(lane));
  }
  std::vector<Tensor> outputs() const {
    std::vector<Tensor> all;
    for (const OwnedStream& stream : streams) synchronize(stream);
    for (const auto& of_lane : buffers) {
      for (const PeerBuffers& each : of_lane) all.push_back(to_host(each.output));
    }
    for (const auto& each : ranks.communicators) each->check();
    return all;
  }

  PeerRanks ranks;
  std::vector<std::unique_ptr<MoeLayer>> layers;
  std::vector<std::vector<PeerBuffers>> buffers;  // of each lane and rank
  std::vector<OwnedStream> streams;               // of each lane
};

void expect_equal(const std::vector<Tensor>& outputs, const std::vector<Tensor>& expected) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    EXPECT_TRUE(bitwise_equal(outputs[i], expected[i])) << i;
  }
}

/// In parts, and as graphs of both lanes that are replayed side by side.
void expect_bits_of_one_by_one(TwoLanes& two) {
  constexpr int kForwards = 20;
  std::vector<std::vector<Tensor>> expected;
  for (int i = 0; i < kForwards; ++i) {
    two.fill(i);
    two.run_one_by_one();
    expected.push_back(two.outputs());
    two.run_together();
    expect_equal(two.outputs(), expected.back());
  }
  std::vector<Graph> graphs;
  for (int lane = 0; lane < kLanes; ++lane) {
    graphs.emplace_back(two.streams[lane],
                        [&] { run_all(two.layers, two.buffers[lane], two.options(lane)); });
  }
  for (int i = 0; i < kForwards; ++i) {
    two.fill(i);
    for (int replay = 0; replay < 50; ++replay) {
      for (int lane = 0; lane < kLanes; ++lane) graphs[lane].launch(two.streams[lane]);
    }
    expect_equal(two.outputs(), expected[i]);
  }
}

TEST_F(PeerLanesTest, RowsOfTwoMicroBatchesOverlap) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const int size : {2, 4}) {
    for (const bool batch_invariant : {false, true}) {
      SCOPED_TRACE(std::to_string(size) + (batch_invariant ? " per slot" : ""));
      TwoLanes two(
          size, weights, [](int, LayerOptions&) {}, batch_invariant);
      EXPECT_TRUE(rows_travel_by_peers(*two.layers[0])) << rows_travel(*two.layers[0]);
      expect_bits_of_one_by_one(two);
    }
  }
}

TEST_F(PeerLanesTest, SumsOfTwoMicroBatchesOverlap) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  TwoLanes two(2, weights, [](int rank, LayerOptions& options) {
    options.require = experts_under_test() + "+no_ep";
    options.parallel = ParallelConfig::of({.tp_size = 2, .expert_parallel = true, .rank = rank});
  });
  EXPECT_TRUE(rows_travel_by_peers(*two.layers[0])) << rows_travel(*two.layers[0]);
  expect_bits_of_one_by_one(two);
}

/// What rank 1 shows must come while rank 0 waits for it. A kernel with so many rows has blocks
/// that leave no room for others on their multiprocessors; of a layer with one lane it has one on
/// each.
TEST_F(PeerLanesTest, AKernelThatWaitsLeavesRoomForOthers) {
  constexpr std::int64_t kMany = 1024;
  const PeerRanks ranks(2);
  const auto layers = ranks.make(make_layer_weights({small_case("bf16")}), kMany, false,
                                 [](int, LayerOptions& options) { options.ranks.lanes = kLanes; });
  std::vector<PeerBuffers> buffers;
  std::vector<OwnedStream> streams;
  for (int r = 0; r < ranks.size(); ++r) {
    streams.emplace_back(kGpu);
    buffers.emplace_back(*layers[r], kMany, kMany);
    buffers[r].fill(input_of(buffers[r].x.shape(), 0, r, 0));
  }
  ForwardOptions options;
  options.max_tokens = kMany;
  run_all(layers, buffers, options);  // loads what a kernel that waits would keep from loading
  wait_for_all(layers);
  std::vector<Tensor> expected;
  for (const PeerBuffers& each : buffers) expected.push_back(to_host(each.output));

  std::vector<MoeLayer::Step> steps;
  for (int r = 0; r < ranks.size(); ++r) {
    const PeerBuffers& own = buffers[r];
    options.stream = streams[r];
    steps.push_back(layers[r]->begin(own.x, own.output, own.scratch(), options));
    steps.back().compute();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // rank 0's kernel waits
  }
  for (MoeLayer::Step& step : steps) step.finish();
  for (int r = 0; r < ranks.size(); ++r) {
    synchronize(streams[r]);
    EXPECT_TRUE(bitwise_equal(to_host(buffers[r].output), expected[r])) << r;
  }
  for (const auto& each : ranks.communicators) each->check();
}

/// The share is the communicator's: a layer with fewer lanes keeps it, and one with more is late
/// behind the first forward.
TEST_F(PeerLanesTest, ALayerWithMoreLanesComesFirst) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const PeerRanks ranks(2);
  const auto make = [&](int lanes) {
    return ranks.make(weights, kTokens, false,
                      [&](int, LayerOptions& options) { options.ranks.lanes = lanes; });
  };
  const auto first = make(1);
  EXPECT_EQ(ranks.communicators[0]->peers()->lanes(), 1);
  make(2);
  const auto fewer = make(1);
  EXPECT_EQ(ranks.communicators[0]->peers()->lanes(), 2);
  std::vector<PeerBuffers> buffers;
  for (const auto& layer : fewer) {
    buffers.emplace_back(*layer, kTokens, kTokens);
    buffers.back().fill(input_of(buffers.back().x.shape(), 0, 0, 0));
  }
  run_all(fewer, buffers, {});
  wait_for_all(fewer);
  make(2);
  run_ranks(2, [&](int rank) {
    LayerOptions options = options_of(kGpu, false);
    options.ranks.communicator = ranks.communicators[rank];
    options.ranks.max_tokens_per_rank = kTokens;
    options.ranks.lanes = 3;
    EXPECT_EQ(error_text([&] { MoeLayer(weights, options); }),
              "options.ranks.lanes 3: layers with 2 have run, whose kernels may wait on too much "
              "of the GPU: make the layer with most lanes first");
  });
}

/// As those that move have other maps in every lane.
TEST_F(PeerLanesTest, ExpertsMoveInAllLanes) {
  const Case spec = small_case("bf16");
  TwoLanes two(
      2, make_layer_weights({spec}), [](int, LayerOptions&) {}, true);
  two.fill(0);
  two.run_one_by_one();
  const std::vector<Tensor> expected = two.outputs();
  std::vector<std::int32_t> experts, places;
  for (std::int32_t e = 0; e < spec.num_experts; ++e) {
    experts.push_back(static_cast<std::int32_t>(spec.num_experts) - 1 - e);
    places.push_back(two.layers[0]->placement()->rank_of()[e]);
  }
  const ExpertPlacement turned(spec.num_experts, 2, experts, places);
  run_ranks(2, [&](int rank) { two.layers[rank]->start_move(turned); });
  for (const auto& layer : two.layers) layer->commit_move();
  two.run_together();
  expect_equal(two.outputs(), expected);
}

TEST_F(PeerLanesTest, TheLastSurvivorHasThemToo) {
  const Case spec = small_case("bf16");
  const LayerWeights weights = make_layer_weights({spec});
  TwoLanes two(2, weights, [](int, LayerOptions&) {});
  const auto left = make_thread_communicators(1, CommunicatorOptions{kPatient, kGpu});
  MoeLayer& layer = *two.layers[0];
  layer.rebind(left[0], ExpertPlacement::linear(spec.num_experts, 1), source_of(weights));
  const MoeLayer alone(weights, options_of(kGpu, false));
  for (int lane = 0; lane < kLanes; ++lane) {
    const PeerBuffers own(layer, kTokens, kTokens);
    const Tensor x = input_of(own.x.shape(), 0, 0, lane);
    own.fill(x);
    synchronize(Stream{kGpu});
    layer.forward(own.x, own.output, own.scratch(), two.options(lane));
    synchronize(two.streams[lane]);
    EXPECT_TRUE(bitwise_equal(to_host(own.output), forward(alone, x, 0))) << lane;
  }
}

TEST_F(PeerLanesTest, AreRefusedWithoutPeerMemory) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const auto ranks = make_thread_communicators(2, {kPatient, kGpu, true, false});
  run_ranks(2, [&](int rank) {
    LayerOptions options = options_of(kGpu, false);
    options.ranks.communicator = ranks[rank];
    options.ranks.max_tokens_per_rank = kTokens;
    options.ranks.lanes = kLanes;
    EXPECT_EQ(error_text([&] { MoeLayer(weights, options); }),
              "options.ranks.lanes 2: only through the memory of GPUs, but here not: rank 0: "
              "peer_memory is false");
  });
}

TEST_F(PeerLanesTest, AStepOfALaneThatIsThrownAwayEndsAll) {
  TwoLanes two(2, make_layer_weights({small_case("bf16")}), [](int, LayerOptions&) {});
  two.fill(0);
  {
    const PeerBuffers& own = two.buffers[1][0];
    two.layers[0]->begin(own.x, own.output, own.scratch(), two.options(1));
  }
  EXPECT_NE(two.ranks.communicators[1]->status().find("a forward was begun and not finished"),
            std::string::npos);
}

// ------------------------------------------------------------------------------------------------
// Two processes, which run the disabled test below: on one GPU, or on two.

TEST_F(PeerLanesTest, DISABLED_OneProcess) {
  if (!std::getenv(kRank)) GTEST_SKIP() << "only as a process of the test below";
  constexpr int kForwards = 50;
  const int rank = std::atoi(std::getenv(kRank));
  const GatherCallback gather = gather_by_files(std::getenv(kFolder), rank, 2);
  const Device device{DeviceKind::kCuda, rank % std::min(cuda_device_count(), 2)};
  const auto communicator =
      std::make_shared<Communicator>(rank, 2, make_control_plane(rank, 2, gather, kPatient),
                                     nullptr, CommunicatorOptions{kPatient, device, true, true});
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const MoeLayer alone(weights, options_of(device, true));
  LayerOptions options = options_of(device, true);
  options.require += "+all2all";
  options.ranks.communicator = communicator;
  options.ranks.max_tokens_per_rank = kTokens;
  options.ranks.lanes = kLanes;
  const MoeLayer layer(weights, options);
  std::vector<OwnedStream> streams;
  std::vector<PeerBuffers> buffers;
  std::vector<std::vector<Tensor>> inputs(kLanes), outputs(kLanes);
  for (int lane = 0; lane < kLanes; ++lane) {
    streams.emplace_back(device);
    buffers.emplace_back(layer, kTokens - rank, kTokens);
    for (int i = 0; i < kForwards; ++i) {
      const Tensor x = input_of(buffers[lane].x.shape(), i, rank, lane);
      inputs[lane].push_back(to_device(x, device));
      outputs[lane].push_back(Tensor::empty(x.shape(), x.dtype(), device));
    }
  }
  synchronize(Stream{device});
  for (int i = 0; i < kForwards; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) {
      ForwardOptions of_lane;
      of_lane.max_tokens = kTokens;
      of_lane.lane = lane;
      of_lane.stream = streams[lane];
      layer.forward(inputs[lane][i], outputs[lane][i], buffers[lane].scratch(), of_lane);
    }
  }
  for (const OwnedStream& stream : streams) synchronize(stream);
  communicator->check();
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < kForwards; ++i) {
      EXPECT_TRUE(
          bitwise_equal(to_host(outputs[lane][i]), forward(alone, to_host(inputs[lane][i]), 0)))
          << "lane " << lane << ", forward " << i;
    }
  }
  communicator->barrier();
}

TEST_F(PeerLanesTest, OverlapOverTwoProcesses) {
  const TemporaryDirectory folder;
  for (const int status : run_processes(2, folder.path())) EXPECT_TRUE(has_ended_well(status));
}

}  // namespace
}  // namespace fusedmoe::testing
