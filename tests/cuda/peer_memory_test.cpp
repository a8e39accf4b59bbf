// Layers whose rows go through the memory of the GPUs: on one GPU, and on all that there are.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "moe/peer_memory.h"
#include "peer_ranks.h"
#include "testing/random.h"

namespace fusedmoe::testing {
namespace {

class PeerMemoryTest : public CudaTest {};

std::size_t bytes_lent(const PeerRanks& ranks) {
  return ranks.communicators[0]->peers()->bytes();
}

/// One GPU for all ranks, or all GPUs.
std::vector<int> gpu_counts() {
  std::vector<int> counts{1};
  if (cuda_device_count() > 1) counts.push_back(cuda_device_count());
  return counts;
}

void expect_as_one(const Tensor& output, const Tensor& expected, bool exact, int rank) {
  if (exact) {
    EXPECT_TRUE(bitwise_equal(output, expected)) << "rank " << rank;
  } else {
    EXPECT_LE(compare(output, expected).max_norm_relative, kTolerance) << "rank " << rank;
  }
}

TEST_F(PeerMemoryTest, RanksGiveTheOutputOfOneGpu) {
  for (const int gpus : gpu_counts()) {
    for (const int size : {2, 4, 8}) {
      const PeerRanks ranks(size, gpus);
      ranks.reserve(std::size_t{16} << 20);
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
                  options.require = std::string("sm90+") + transport;
                });
            EXPECT_EQ(rows_travel(*layers[0]), "peer memory");
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

/// A layer of random sizes, placed at random, with several copies of some experts.
struct RandomLayer {
  Case spec;
  int size;
  std::int64_t most;
  bool exact, allgather, sum_in_f32, quantized;
  ExpertPlacement placement;

  explicit RandomLayer(Random& random) {
    constexpr const char* kSchemes[] = {"bf16", "fp8_block", "fp8_channel_token", "mxfp4_w4a16"};
    size = static_cast<int>(2 + random.below(7));
    spec.num_experts = 3 + random.below(18);
    spec.topk = 1 + random.below(std::min<std::int64_t>(spec.num_experts, 6));
    spec.hidden = 128 * (1 + random.below(4));
    spec.intermediate = 128;
    spec.scheme = parse_scheme(kSchemes[random.below(4)]);
    spec.seed = random.bits();
    most = 1 + random.below(40);
    exact = random.below(2) == 0;
    allgather = random.below(3) == 0;
    sum_in_f32 = random.below(3) == 0;
    quantized = spec.scheme.activations && random.below(2) == 0;  // rows travel so
    std::vector<std::int32_t> experts, places;
    for (std::int64_t e = 0; e < spec.num_experts; ++e) {
      std::set<std::int32_t> of_expert;
      const std::int64_t copies = random.below(4) == 0 ? 2 : 1;
      while (static_cast<std::int64_t>(of_expert.size()) < copies) {
        of_expert.insert(static_cast<std::int32_t>(random.below(size)));
      }
      for (const std::int32_t rank : of_expert) {
        experts.push_back(static_cast<std::int32_t>(e));
        places.push_back(rank);
      }
    }
    placement = ExpertPlacement(spec.num_experts, size, experts, places);
  }
};

/// Ids of all kinds: some name no expert, some the same one twice.
void draw_routing(Random& random, std::int64_t num_experts, const Tensor& ids,
                  const Tensor& weights) {
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(random.below(num_experts + 1) - 1);
    weights.as<float>()[i] = static_cast<float>(random.uniform());
  }
}

/// FUSEDMOE_TEST_RUNS: how many layers, of ten forwards each.
TEST_F(PeerMemoryTest, RandomLayersGiveTheOutputOfOneGpu) {
  const char* wanted = std::getenv("FUSEDMOE_TEST_RUNS");
  const int runs = wanted ? std::atoi(wanted) : 40;
  for (int run = 0; run < runs && !HasFailure(); ++run) {
    SCOPED_TRACE("layer " + std::to_string(run));
    Random random(1000 + static_cast<std::uint64_t>(run));
    const RandomLayer made(random);
    const LayerWeights weights = make_layer_weights({made.spec});
    const MoeLayer alone(weights, options_of(kGpu, made.exact));
    const PeerRanks ranks(made.size, gpu_counts().back());
    const auto layers = ranks.make(weights, made.most, made.exact, [&](int, LayerOptions& options) {
      options.ranks.placement = made.placement;
      if (made.sum_in_f32 && !made.exact) options.ranks.combine_dtype = DType::kF32;
      if (made.quantized) options.ranks.dispatch_dtype = made.spec.scheme.activations->value;
      if (made.allgather) options.require = "sm90+allgather_reducescatter";
    });
    for (int step = 0; step < 10; ++step) {
      const std::int64_t most = 1 + random.below(made.most);
      std::vector<PeerBuffers> buffers;
      for (int r = 0; r < made.size; ++r) {
        const std::int64_t tokens = r == step % made.size ? most : random.below(most + 1);
        buffers.emplace_back(*layers[r], tokens, made.most);
        const Tensor ids = Tensor::empty({tokens, made.spec.topk}, DType::kI32);
        const Tensor factors = Tensor::empty(ids.shape(), DType::kF32);
        draw_routing(random, made.spec.num_experts, ids, factors);
        const Stream stream{buffers[r].x.device()};
        copy(ids, buffers[r].ids, stream);
        copy(factors, buffers[r].weights, stream);
        buffers[r].fill(random_tensor(DType::kBF16, {tokens, made.spec.hidden}, 1, random.bits()));
      }
      ForwardOptions options;
      options.max_tokens = most;
      options.fixed_sizes = random.below(2) == 0;
      run_all(layers, buffers, options, true);
      wait_for_all(layers);
      for (int r = 0; r < made.size; ++r) {
        ranks.communicators[r]->check();
        const PeerBuffers& own = buffers[r];
        if (own.x.size(0) == 0) continue;
        const Tensor x = to_gpu(to_host(own.x)), output = Tensor::empty(x.shape(), x.dtype(), kGpu);
        const PeerBuffers scratch(alone, x.size(0), x.size(0));
        alone.forward_routed(x, {to_gpu(to_host(own.ids)), to_gpu(to_host(own.weights))}, output,
                             scratch.scratch());
        synchronize(Stream{kGpu});
        expect_as_one(to_host(own.output), to_host(output), made.exact, r);
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

/// How many kernels a graph has that records such work.
std::size_t launches_of(Stream stream, const std::function<void()>& work) {
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  EXPECT_EQ(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  work();
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(handle, &graph), cudaSuccess);
  std::size_t count = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &count), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  return count;
}

/// With nothing between compute and finish, the kernel that sums also tells that the experts have
/// ended.
TEST_F(PeerMemoryTest, AForwardIsOneLaunchLessThanItsParts) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const PeerRanks ranks(2);
  const auto layers = ranks.make(weights, kTokens);
  std::vector<PeerBuffers> buffers;
  for (int r = 0; r < 2; ++r) buffers.emplace_back(*layers[r], tokens_of(r), kTokens);
  const OwnedStream stream(kGpu);
  ForwardOptions options;
  options.stream = stream;
  options.max_tokens = kTokens;
  run_all(layers, buffers, options);  // loads what it needs
  synchronize(stream);
  const PeerBuffers& own = buffers[0];
  const std::size_t whole =
      launches_of(stream, [&] { layers[0]->forward(own.x, own.output, own.scratch(), options); });
  const std::size_t parts = launches_of(stream, [&] {
    MoeLayer::Step step = layers[0]->begin(own.x, own.output, own.scratch(), options);
    step.compute();
    step.finish();
  });
  EXPECT_EQ(whole + 1, parts);
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

/// All tokens choose the experts of one rank, where there is room for twice their mean. With fewer
/// tokens, rows of GEMM 2 in fp32 would take more room than what passes save.
TEST_F(PeerMemoryTest, MoreExpertRowsThanThereIsRoomForTakeSeveralPasses) {
  constexpr std::int64_t kMany = 8192;
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const MoeLayer alone(weights, options_of(kGpu, false));
  const PeerRanks ranks(4);
  const auto layers = ranks.make(weights, kMany);
  EXPECT_LT(layers[0]->workspace_bytes(kMany), layers[0]->workspace_bytes(kMany, true));
  std::vector<PeerBuffers> buffers;
  for (int r = 0; r < ranks.size(); ++r) {
    const std::int64_t tokens = kMany - r;
    buffers.emplace_back(*layers[r], tokens, kMany);
    buffers[r].fill(random_tensor(DType::kBF16, {tokens, kHidden}, 1, 70 + r));
    const Tensor ids = Tensor::empty({tokens, 4}, DType::kI32);
    for (std::int64_t i = 0; i < ids.numel(); ++i) {
      ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(i % 4);  // linear: 0 1 2 3 | ...
    }
    copy(ids, buffers[r].ids, Stream{kGpu});
    copy(random_tensor(DType::kF32, ids.shape(), 1, r), buffers[r].weights, Stream{kGpu});
  }
  run_all(layers, buffers, {}, true);
  synchronize(Stream{kGpu});
  for (int r = 0; r < ranks.size(); ++r) {
    const PeerBuffers& own = buffers[r];
    const Tensor output = Tensor::empty(own.x.shape(), own.x.dtype(), kGpu);
    const PeerBuffers scratch(alone, kMany, kMany);
    alone.forward_routed(own.x, {own.ids, own.weights}, output, scratch.scratch());
    expect_as_one(to_host(own.output), to_host(output), false, r);
  }
}

/// Then a larger layer sends messages, and says why. Those that there are stay as they are.
TEST_F(PeerMemoryTest, ArenasGrowUntilTheFirstForward) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const PeerRanks ranks(2);
  const auto small = ranks.make(weights, 4), large = ranks.make(weights, 2000);
  const std::size_t bytes = bytes_lent(ranks);
  ranks.make(weights, 8);
  EXPECT_EQ(bytes_lent(ranks), bytes) << "it was large enough";
  std::vector<PeerBuffers> buffers;
  for (int r = 0; r < 2; ++r) {
    buffers.emplace_back(*small[r], 3, 4);
    buffers[r].fill(random_tensor(DType::kBF16, {3, kHidden}, 1, r));
  }
  run_all(small, buffers, {});
  synchronize(Stream{kGpu});
  const auto larger = ranks.make(weights, 20000), later = ranks.make(weights, 8);
  EXPECT_NE(rows_travel(*larger[0]).find("make the largest layer first"), std::string::npos)
      << rows_travel(*larger[0]);
  EXPECT_EQ(rows_travel(*larger[1]), rows_travel(*larger[0]));
  EXPECT_EQ(rows_travel(*later[0]), "peer memory");
  EXPECT_EQ(bytes_lent(ranks), bytes);
  const MoeLayer alone(weights, options_of(kGpu, false));
  run_ranks(2, [&](int rank) {
    const Tensor x = to_host(buffers[rank].x);
    expect_as_one(forward(*larger[rank], x, 4), forward(alone, x, 0), false, rank);
  });
  run_all(small, buffers, {});
  synchronize(Stream{kGpu});
  for (int r = 0; r < 2; ++r) {
    expect_as_one(to_host(buffers[r].output), forward(alone, to_host(buffers[r].x), 0), false, r);
  }
}

TEST_F(PeerMemoryTest, BytesAreKnownBefore) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const PeerRanks ranks(2);
  const auto layers = ranks.make(weights, 100);
  MoeConfig config = layers[0]->config();
  RankOptions options;
  options.max_tokens_per_rank = 100;
  const std::size_t bytes = select(config, "sm90+all2all").peer_bytes(options);
  EXPECT_GT(bytes, std::size_t{2 * 100 * kHidden * 2});
  EXPECT_LE(bytes, bytes_lent(ranks));
  EXPECT_LT(bytes_lent(ranks) - bytes, std::size_t{4} << 20) << "pages";
}

TEST_F(PeerMemoryTest, LinksAreTimed) {
  for (const int gpus : gpu_counts()) {
    const PeerRanks ranks(std::max(gpus, 2), gpus);
    ranks.reserve(std::size_t{1} << 20);
    for (const auto& each : ranks.communicators) {
      const std::vector<PeerLink>& links = each->peers()->links();
      ASSERT_EQ(static_cast<int>(links.size()), ranks.size());
      for (const PeerLink& link : links) {
        EXPECT_GT(link.bytes_per_second, 2e9);
        EXPECT_LT(link.bytes_per_second, 50e12);
        EXPECT_GT(link.word_us, 0.1);
        EXPECT_LT(link.word_us, 1000);
      }
      EXPECT_EQ(each->slow_peers(), "");
    }
  }
}

bool is_nccl_loaded() {
  void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library) dlclose(library);
  return library != nullptr;
}

/// By a layer whose rows are messages, where each rank has a GPU.
TEST_F(PeerMemoryTest, NcclIsLoadedWhenMessagesAreNeeded) {
  if (is_nccl_loaded()) GTEST_SKIP() << "something else has loaded it";
  setenv("NCCL_NVLS_ENABLE", "0", 0);  // before NCCL is loaded
  const int gpus = std::min(cuda_device_count(), 2);
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const auto control = make_thread_control_plane();
  run_ranks(2, [&](int rank) {
    const Device device{DeviceKind::kCuda, rank % gpus};
    const auto ranks = make_communicator(rank, 2, control, {kPatient, device, true, true});
    LayerOptions options = options_of(device, false);
    options.ranks.communicator = ranks;
    options.ranks.max_tokens_per_rank = kTokens;
    EXPECT_EQ(rows_travel(MoeLayer(weights, options)), "peer memory");
    EXPECT_EQ(ranks->backend(), "nccl");
    EXPECT_FALSE(is_nccl_loaded());
    ranks->barrier();
    if (gpus < 2 || !nccl_info().problem.empty()) return;
    options.ranks.receive_capacity = 2 * kTokens;
    const MoeLayer layer(weights, options);
    EXPECT_NE(rows_travel(layer).find("messages over nccl: receive_capacity"), std::string::npos);
    EXPECT_TRUE(is_nccl_loaded());
    const Tensor x = random_tensor(DType::kBF16, {tokens_of(rank), kHidden}, 1, 70 + rank);
    const MoeLayer alone(weights, options_of(device, false));
    expect_as_one(forward(layer, x, kTokens), forward(alone, x, 0), false, rank);
    ranks->barrier();
  });
}

/// Without a word, and without NCCL: each rank is a thread with a GPU of its own.
TEST_F(PeerMemoryTest, IsTheWayOfRanksWithAGpuEach) {
  const int size = cuda_device_count();
  if (size < 2) GTEST_SKIP() << "one GPU";
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const auto control = make_thread_control_plane();
  run_ranks(size, [&](int rank) {
    const Device device{DeviceKind::kCuda, rank};
    const CurrentDevice current(device);
    LayerOptions options = options_of(device, false);
    const Tensor x = random_tensor(DType::kBF16, {tokens_of(rank), kHidden}, 1, 70 + rank);
    const Tensor expected = forward(MoeLayer(weights, options), x, 0);
    const auto ranks = make_communicator(rank, size, control, {kPatient, device});
    options.ranks.communicator = ranks;
    options.ranks.max_tokens_per_rank = kTokens;
    const MoeLayer layer(weights, options);
    EXPECT_EQ(rows_travel(layer), "peer memory");
    for (const bool fixed_sizes : {false, true}) {
      expect_as_one(forward(layer, x, kTokens, nullptr, fixed_sizes), expected, false, rank);
    }
    ranks->check();
    ranks->barrier();
  });
}

/// All ranks then send messages, and say why.
TEST_F(PeerMemoryTest, OneRankThatCannotLeavesAllWithMessages) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  struct Refusal {
    std::optional<bool> first, second;
    const char* reason;
  };
  for (const Refusal& each : {Refusal{{}, {}, "rank 0: it shares its GPU with rank 1"},
                              Refusal{true, false, "rank 1: peer_memory is false"},
                              Refusal{true, {}, "rank 1: it shares its GPU with rank 0"}}) {
    const auto planes = make_thread_data_planes(2, kGpu);
    const auto control = make_thread_control_plane();
    run_ranks(2, [&](int rank) {
      const CommunicatorOptions options{kPatient, kGpu, true, rank == 0 ? each.first : each.second};
      const auto ranks = std::make_shared<Communicator>(rank, 2, control, planes[rank], options);
      LayerOptions layer = options_of(kGpu, false);
      layer.ranks.communicator = ranks;
      layer.ranks.max_tokens_per_rank = kTokens;
      EXPECT_EQ(rows_travel(MoeLayer(weights, layer)),
                std::string("messages over threads: ") + each.reason);
      layer.ranks.receive_capacity = 20;
      EXPECT_NE(rows_travel(MoeLayer(weights, layer)).find("receive_capacity"), std::string::npos);
      ranks->barrier();
    });
  }
}

}  // namespace
}  // namespace fusedmoe::testing
