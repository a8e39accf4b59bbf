// Layers on several ranks on GPUs: threads that share one, and over NCCL with a GPU each.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "../ranks/dropping_ranks.h"
#include "../ranks/leaks.h"
#include "fusedmoe/layer.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "gpu_ranks.h"
#include "testing/compare.h"

namespace fusedmoe::testing {
namespace {

void expect_as_one(const Setting& setting, const char* scheme, const char* transport,
                   bool batch_invariant, bool fixed_sizes, bool monolithic = false) {
  SCOPED_TRACE(setting.name() + " " + scheme + " " + transport);
  const LayerWeights weights = make_layer_weights({small_case(scheme)});
  Ranks ranks(setting);
  run_ranks(setting.size, [&](int rank) {
    const auto communicator = ranks.join(rank);
    const Device device = communicator->device();
    LayerOptions options = options_of(device, batch_invariant);
    const MoeLayer alone(weights, options);
    options.require += std::string("+") + transport;
    options.ranks.communicator = communicator;
    options.ranks.max_tokens_per_rank = kTokens;
    options.monolithic = monolithic;
    const MoeLayer layer(weights, options);
    for (const std::int64_t tokens : {tokens_of(rank), std::int64_t{rank == 0 ? 1 : 0}}) {
      const Tensor x = random_tensor(DType::kBF16, {tokens, kHidden}, 1, 70 + rank);
      const Tensor output = forward(layer, x, kTokens, nullptr, fixed_sizes);
      EXPECT_TRUE(bitwise_equal(forward(layer, x, kTokens, nullptr, fixed_sizes), output));
      const Tensor expected = forward(alone, x, 0);
      if (batch_invariant) {
        EXPECT_TRUE(bitwise_equal(output, expected)) << "rank " << rank;
      } else {
        EXPECT_LE(compare(output, expected).max_norm_relative, kTolerance) << "rank " << rank;
      }
    }
    communicator->barrier();
  });
}

TEST(CudaRanksTest, LayersGiveTheOutputOfOneGpu) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Setting& setting : all_settings()) {
    for (const char* scheme : {"bf16", "mxfp4_w4a16"}) {
      for (const char* transport : {"all2all", "allgather_reducescatter"}) {
        expect_as_one(setting, scheme, transport, false, false);
        expect_as_one(setting, scheme, transport, false, true);
        expect_as_one(setting, scheme, transport, true, false);
      }
    }
    expect_as_one(setting, "bf16", "allgather_reducescatter", false, false, true);
    for (const char* scheme : {"fp8_block", "w4a8", "nvfp4"}) {
      expect_as_one(setting, scheme, "all2all", true, false);
    }
  }
}

/// Of which one rank has as many as there can be, so that it packs nothing with fixed sizes.
TEST(CudaRanksTest, ManyTokensGiveTheOutputOfOneGpu) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  constexpr std::int64_t kMost = 2100;
  Case spec = small_case("bf16");
  spec.hidden = 4096;
  spec.intermediate = 64;
  const LayerWeights weights = make_layer_weights({spec});
  std::vector<Tensor> inputs;
  for (const std::int64_t tokens : {kMost, std::int64_t{1500}}) {
    inputs.push_back(random_tensor(DType::kBF16, {tokens, spec.hidden}, 1, tokens));
  }
  for (const Setting& setting : all_settings()) {
    if (setting.size != 2) continue;
    for (const bool fixed_sizes : {false, true}) {
      SCOPED_TRACE(setting.name() + (fixed_sizes ? " fixed sizes" : " exact sizes"));
      Ranks ranks(setting);
      run_ranks(setting.size, [&](int rank) {
        const auto communicator = ranks.join(rank);
        LayerOptions options = options_of(communicator->device(), false);
        const Tensor expected = forward(MoeLayer(weights, options), inputs[rank], 0);
        options.ranks.communicator = communicator;
        options.ranks.max_tokens_per_rank = kMost;
        for (const char* transport : {"sm90+all2all", "sm90+allgather_reducescatter"}) {
          options.require = transport;
          const MoeLayer layer(weights, options);
          const Tensor output = forward(layer, inputs[rank], kMost, nullptr, fixed_sizes);
          EXPECT_LE(compare(output, expected).max_norm_relative, kTolerance)
              << transport << ", rank " << rank;
          EXPECT_TRUE(
              bitwise_equal(forward(layer, inputs[rank], kMost, nullptr, fixed_sizes), output));
        }
        communicator->barrier();
      });
    }
  }
}

/// One forward with the caller's ids; `dropped`: the number of dropped rows, read from the device.
Tensor forward_routed(const MoeLayer& layer, const Tensor& x, const Tensor& ids,
                      const Tensor& factors, std::int64_t most, std::int32_t* dropped) {
  const Device device = layer.config().device;
  const std::size_t bytes = layer.workspace_bytes(std::max(most, x.size(0)));
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, device);
  const Tensor output = Tensor::empty(x.shape(), x.dtype(), device);
  const Tensor count = Tensor::empty({1}, DType::kI32, device);
  const Tensor ids_there = to_device(ids, device), factors_there = to_device(factors, device);
  ForwardOptions options;
  options.max_tokens = most;
  options.dropped_rows = count;
  layer.forward_routed(to_device(x, device), {ids_there, factors_there}, output,
                       {workspace.data(), bytes}, options);
  synchronize(Stream{device});
  *dropped = *to_device(count, {}).as<std::int32_t>();
  return to_device(output, {});
}

TEST(CudaRanksTest, RowsThatDoNotFitAreDropped) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const Setting& setting : all_settings()) {
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      for (const CombineMode combine : {CombineMode::kPerRank, CombineMode::kPerSlot}) {
        SCOPED_TRACE(setting.name() + " " + transport + " " + std::string(name(combine)));
        RankCase how{.size = setting.size,
                     .transport = transport,
                     .placement = ExpertPlacement::linear(13, setting.size)};
        const std::int64_t capacity = kTokens;
        std::vector<Tensor> ids;
        for (int rank = 0; rank < setting.size; ++rank) {
          Random random(90 + static_cast<std::uint64_t>(rank));
          ids.push_back(Tensor::empty({tokens_of(rank), 4}, DType::kI32));
          for (std::int64_t i = 0; i < ids.back().numel(); ++i) {
            ids.back().as<std::int32_t>()[i] = static_cast<std::int32_t>(random.below(14) - 1);
          }
        }
        const Dropped expected = drop_rows(how, ids, capacity);
        Ranks ranks(setting);
        run_ranks(setting.size, [&](int rank) {
          const auto communicator = ranks.join(rank);
          LayerOptions options = options_of(communicator->device(), false);
          const MoeLayer alone(weights, options);
          options.require += std::string("+") + transport;
          options.ranks.communicator = communicator;
          options.ranks.placement = how.placement;
          options.ranks.max_tokens_per_rank = kTokens;
          options.ranks.receive_capacity = capacity;
          options.ranks.drop_rows = true;
          options.ranks.combine = combine;
          const MoeLayer layer(weights, options);
          const Tensor x = random_tensor(DType::kBF16, {tokens_of(rank), kHidden}, 1, 70 + rank);
          const Tensor factors = random_tensor(DType::kF32, {tokens_of(rank), 4}, 1, rank);
          std::int32_t dropped = 77, none = 77;
          const Tensor output = forward_routed(layer, x, ids[rank], factors, kTokens, &dropped);
          const Tensor wanted = forward_routed(alone, x, expected.ids[rank], factors, 0, &none);
          EXPECT_EQ(dropped, expected.rows[rank]) << "rank " << rank;
          EXPECT_EQ(none, 0);
          EXPECT_LE(compare(output, wanted).max_norm_relative, kTolerance) << "rank " << rank;
          communicator->barrier();
        });
      }
    }
  }
}

/// All tokens choose the experts of rank 0, where there is room for twice their mean. With fewer
/// tokens, rows of GEMM 2 in fp32 would take more room than what passes save.
TEST(CudaRanksTest, MoreExpertRowsThanThereIsRoomForTakeSeveralPasses) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  constexpr std::int64_t kMany = 8192;
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const Setting& setting : all_settings()) {
    if (setting.size != 4) continue;
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      for (const CombineMode combine : {CombineMode::kPerRank, CombineMode::kPerSlot}) {
        SCOPED_TRACE(setting.name() + " " + transport + " " + std::string(name(combine)));
        Ranks ranks(setting);
        run_ranks(setting.size, [&](int rank) {
          const auto communicator = ranks.join(rank);
          LayerOptions options = options_of(communicator->device(), false);
          const MoeLayer alone(weights, options);
          options.require += std::string("+") + transport;
          options.ranks.communicator = communicator;
          options.ranks.max_tokens_per_rank = kMany;
          options.ranks.combine = combine;
          const MoeLayer layer(weights, options);
          EXPECT_LT(layer.workspace_bytes(kMany), layer.workspace_bytes(kMany, true));
          const Tensor x = random_tensor(DType::kBF16, {kMany - rank, kHidden}, 1, 70 + rank);
          const Tensor factors = random_tensor(DType::kF32, {x.size(0), 4}, 1, rank);
          const Tensor ids = Tensor::empty({x.size(0), 4}, DType::kI32);
          for (std::int64_t i = 0; i < ids.numel(); ++i) {
            ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(i % 4);  // linear: 0 1 2 3 | ...
          }
          std::int32_t none = 77;
          const Tensor output = forward_routed(layer, x, ids, factors, kMany, &none);
          const Tensor expected = forward_routed(alone, x, ids, factors, 0, &none);
          EXPECT_LE(compare(output, expected).max_norm_relative, kTolerance) << "rank " << rank;
          communicator->barrier();
        });
      }
    }
  }
}

TEST(CudaRanksTest, DispatchDtypeChangesNoBit) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  const std::pair<const char*, DType> schemes[] = {
      {"fp8_block", DType::kE4M3},         {"fp8_channel_token", DType::kE4M3},
      {"fp8_tensor_static", DType::kE4M3}, {"w4a8", DType::kE4M3},
      {"mxfp4_mxfp8", DType::kE4M3},       {"mxfp4:ocp", DType::kE2M1}};
  for (const Setting& setting : all_settings()) {
    for (const auto& [scheme, activations] : schemes) {
      for (const char* transport : {"all2all", "allgather_reducescatter"}) {
        for (const int mode : {0, 1, 2}) {  // per rank; with fixed sizes; batch-invariant
          SCOPED_TRACE(setting.name() + " " + scheme + " " + transport + std::to_string(mode));
          const LayerWeights weights = make_layer_weights({small_case(scheme)});
          Ranks ranks(setting);
          run_ranks(setting.size, [&, activations = activations](int rank) {
            const auto communicator = ranks.join(rank);
            LayerOptions options = options_of(communicator->device(), mode == 2);
            options.require += std::string("+") + transport;
            options.ranks.communicator = communicator;
            options.ranks.max_tokens_per_rank = kTokens;
            const bool fixed_sizes = mode == 1;
            const Tensor x = random_tensor(DType::kBF16, {tokens_of(rank), kHidden}, 1, 70 + rank);
            options.ranks.dispatch_dtype = DType::kBF16;
            const Tensor expected =
                forward(MoeLayer(weights, options), x, kTokens, nullptr, fixed_sizes);
            options.ranks.dispatch_dtype = activations;
            const MoeLayer layer(weights, options);
            EXPECT_TRUE(bitwise_equal(forward(layer, x, kTokens, nullptr, fixed_sizes), expected))
                << "rank " << rank;
            communicator->barrier();
          });
        }
      }
    }
  }
}

/// Inputs whose ids differ, and the outputs of one GPU for them.
struct Batches {
  static constexpr std::int64_t kCount = 16;
  std::vector<Tensor> inputs, expected;

  Batches(const MoeLayer& alone, int rank) {
    const Device device = alone.config().device;
    for (std::int64_t i = 0; i < kCount; ++i) {
      const Tensor x = random_tensor(DType::kBF16, {kTokens, kHidden}, 1, 1000 * rank + i);
      inputs.push_back(to_device(x, device));
      expected.push_back(forward(alone, x, 0));
    }
  }
};

/// Replays a graph of `layer` with other inputs each time, between calls without a graph, some of
/// which have fixed sizes, too. Only the others wait for the device before the end, so a step may
/// begin while another rank is in the last one.
void expect_replays(const MoeLayer& layer, const Batches& batches, Communicator& communicator) {
  constexpr std::int64_t kReplays = 1000;
  const Device device = layer.config().device;
  // Recorded forwards have fixed sizes; those between the replays count.
  const std::size_t bytes =
      std::max(layer.workspace_bytes(kTokens), layer.workspace_bytes(kTokens, true));
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, device);
  const Tensor x = Tensor::zeros({kTokens, kHidden}, DType::kBF16, device);
  const Tensor output = Tensor::empty(x.shape(), x.dtype(), device);
  const Tensor outputs = Tensor::empty({kReplays, kTokens, kHidden}, DType::kBF16, device);
  const OwnedStream stream(device);
  ForwardOptions options;
  options.stream = stream;
  const auto run = [&](bool fixed_sizes) {
    options.fixed_sizes = fixed_sizes;
    layer.forward(x, output, {workspace.data(), bytes}, options);
  };
  run(false);
  synchronize(stream);
  communicator.barrier();
  const Graph graph(stream, [&] { run(false); });
  for (std::int64_t replay = 0; replay < kReplays; ++replay) {
    copy(batches.inputs[replay % Batches::kCount], x, stream);
    replay % 10 == 9 ? run(replay % 100 != 99) : graph.launch(stream);
    copy(output, outputs.select(0, replay), stream);
  }
  synchronize(stream);
  communicator.check();
  const Tensor all = to_device(outputs, {});
  for (std::int64_t replay = 0; replay < kReplays; ++replay) {
    const Tensor& expected = batches.expected[replay % Batches::kCount];
    ASSERT_LE(compare(all.select(0, replay), expected).max_norm_relative, kTolerance) << replay;
  }
}

TEST(CudaRanksTest, GraphsReplayWithOtherIds) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Setting& setting : all_settings()) {
    if (!setting.nccl) continue;
    const LayerWeights weights = make_layer_weights({small_case("bf16")});
    Ranks ranks(setting);
    run_ranks(setting.size, [&](int rank) {
      const auto communicator = ranks.join(rank);
      LayerOptions options = options_of(communicator->device(), false);
      const Batches batches(MoeLayer(weights, options), rank);
      options.ranks.communicator = communicator;
      options.ranks.max_tokens_per_rank = kTokens;
      for (const char* transport : {"sm90+all2all", "sm90+allgather_reducescatter"}) {
        options.require = transport;
        expect_replays(MoeLayer(weights, options), batches, *communicator);
      }
    });
  }
}

TEST(CudaRanksTest, AMissingRankIsNamed) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Setting& setting : settings()) {
    if (!setting.nccl) continue;
    const std::chrono::milliseconds timeout(3000);
    const auto control = make_thread_control_plane();
    std::vector<std::string> reasons(setting.size);
    run_ranks(setting.size, [&](int rank) {
      const Device device{DeviceKind::kCuda, rank};
      Communicator communicator(rank, setting.size, control,
                                make_nccl_data_plane(rank, setting.size, device, control, timeout),
                                {timeout, device});
      const Tensor numbers = Tensor::zeros({2}, DType::kI32, device);
      if (rank != 1) {
        const int peer = 1;
        const Message send{peer, numbers.data(), 4}, receive{peer, numbers.as<int>() + 1, 4};
        communicator.exchange({&send, 1}, {&receive, 1}, Stream{device}, "a step");
        synchronize(Stream{device});  // ends when NCCL is aborted
      } else {
        std::this_thread::sleep_for(timeout + std::chrono::seconds(2));
      }
      reasons[rank] = communicator.status();
      // The device works on.
      EXPECT_NO_THROW(synchronize(Stream{device}));
    });
    for (const std::string& reason : reasons) {
      EXPECT_NE(reason.find("rank 1 did not arrive"), std::string::npos) << reason;
    }
  }
}

/// What it has enqueued waits for rank 1, which never comes, and nobody asks whether it has ended.
TEST(CudaRanksTest, ACommunicatorWithWorkForAMissingRankGoesAtItsDeadline) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Setting& setting : settings()) {
    if (!setting.nccl || setting.size < 2) continue;
    const std::chrono::milliseconds timeout(3000);
    const auto control = make_thread_control_plane();
    std::atomic<int> gone{0};
    run_ranks(setting.size, [&](int rank) {
      const Device device{DeviceKind::kCuda, rank};
      const Tensor numbers = Tensor::zeros({2}, DType::kI32, device);
      auto communicator =
          make_communicator(rank, setting.size, control, {timeout, device, true, false});
      if (rank == 1) {
        while (gone < setting.size - 1) std::this_thread::yield();
        return;
      }
      const Message send{1, numbers.data(), 4}, receive{1, numbers.as<int>() + 1, 4};
      communicator->exchange({&send, 1}, {&receive, 1}, Stream{device}, "a step");
      const auto begin = std::chrono::steady_clock::now();
      communicator.reset();
      EXPECT_LT(std::chrono::steady_clock::now() - begin, timeout + std::chrono::seconds(5));
      ++gone;
      EXPECT_NO_THROW(synchronize(Stream{device}));
    });
    EXPECT_NE(control->read("failure", timeout).value_or("").find("rank 1 did not arrive"),
              std::string::npos);
  }
}

/// NCCL keeps a communicator for as long as a graph has its calls, also when it was aborted.
TEST(CudaRanksTest, AGraphMayOutliveItsCommunicator) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  constexpr std::chrono::milliseconds kTimeout(3000);
  for (const Setting& setting : settings()) {
    for (const bool fails : {false, true}) {
      if (!setting.nccl || setting.size > 2) continue;
      Ranks ranks(setting, kTimeout);
      run_ranks(setting.size, [&](int rank) {
        auto communicator = ranks.join(rank);
        const Device device = communicator->device();
        const int peer = 1 - rank;
        const Tensor numbers = Tensor::zeros({2}, DType::kI32, device);
        const Message send{peer, numbers.data(), 4}, receive{peer, numbers.as<int>() + 1, 4};
        const OwnedStream stream(device);
        const Graph graph(stream, [&] {
          communicator->exchange({&send, 1}, {&receive, 1}, stream, "a step");
        });
        graph.launch(stream);
        synchronize(stream);
        communicator->barrier();
        if (fails) communicator->abort("enough");
        const auto begin = std::chrono::steady_clock::now();
        communicator.reset();
        EXPECT_LT(std::chrono::steady_clock::now() - begin, kTimeout + std::chrono::seconds(5));
      });
    }
  }
}

std::size_t device_bytes_in_use() {
  std::size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return total - free;
}

/// As LeakTest does with other data planes. One GPU suffices: then nothing travels, but NCCL is
/// made and aborted all the same. Making NCCL takes most of a round.
TEST(CudaRanksTest, FortyFailuresOverNcclLeakNothing) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  if (!nccl_info().problem.empty()) GTEST_SKIP() << nccl_info().problem;
  setenv("NCCL_NVLS_ENABLE", "0", 0);  // before NCCL is loaded
  const Setting setting{std::min(cuda_device_count(), 2), true};
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const Tensor x = random_tensor(DType::kBF16, {kTokens, kHidden}, 1, 3);
  const auto round = [&](int number) {
    Ranks ranks(setting);
    const auto errors = errors_of_ranks(setting.size, [&](int rank) {
      const auto communicator = ranks.join(rank);
      LayerOptions options = options_of(communicator->device(), false);
      options.ranks.communicator = communicator;
      options.ranks.max_tokens_per_rank = kTokens;
      const MoeLayer layer(weights, options);
      forward(layer, x, setting.size > 1 ? kTokens : 0);
      if (rank == number % setting.size) communicator->abort("once more");
      forward(layer, x, setting.size > 1 ? kTokens : 0);
      communicator->check();
    });
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("once more"), std::string::npos) << error;
    }
  };
  expect_no_leaks(round, 40, device_bytes_in_use);
}

}  // namespace
}  // namespace fusedmoe::testing
