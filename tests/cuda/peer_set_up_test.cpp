// How ranks come to map the memory of each other's GPUs: how much, with which links, and what they
// do without.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layer/peer_rows.h"
#include "moe/peer_memory.h"
#include "peer_ranks.h"

namespace fusedmoe::testing {
namespace {

class PeerSetUpTest : public CudaTest {};

std::size_t bytes_lent(const PeerRanks& ranks) {
  return ranks.communicators[0]->peers()->bytes();
}

/// Then a larger layer sends messages, and says why. Those that there are stay as they are.
TEST_F(PeerSetUpTest, ArenasGrowUntilTheFirstForward) {
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
  EXPECT_NE(rows_travel(*larger[0]).find("make all layers before one runs"), std::string::npos)
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

TEST_F(PeerSetUpTest, BytesAreKnownBefore) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const PeerRanks ranks(2);
  const auto layers = ranks.make(weights, 100);
  MoeConfig config = layers[0]->config();
  RankOptions options;
  options.max_tokens_per_rank = 100;
  const std::size_t bytes = select(config, experts_under_test() + "+all2all").peer_bytes(options);
  EXPECT_GT(bytes, std::size_t{2 * 100 * kHidden * 2});
  EXPECT_LE(bytes, bytes_lent(ranks));
  EXPECT_LT(bytes_lent(ranks) - bytes, std::size_t{4} << 20) << "pages";
}

/// Of layers of one communicator one may publish most, and another leave most where it is added.
TEST_F(PeerSetUpTest, LayersOfOtherShapesHaveRoomBesideEachOther) {
  constexpr std::int64_t kMost = 2048;
  const PeerRanks ranks(2);
  PeerBytes most;
  std::size_t largest = 0;
  for (const bool per_slot : {false, true}) {
    Case spec = small_case("bf16");
    spec.hidden = per_slot ? 512 : 2048;
    spec.topk = per_slot ? 8 : 2;
    const auto layers = ranks.make(make_layer_weights({spec}), kMost, per_slot);
    MoeConfig config = layers[0]->config();
    config.combine = per_slot ? CombineMode::kPerSlot : CombineMode::kPerRank;
    RankOptions options;
    options.max_tokens_per_rank = kMost;
    const PeerBytes bytes = layer::PeerRows::arena_bytes(config, options, 2);
    most = {std::max(most.published, bytes.published), std::max(most.results, bytes.results)};
    largest = std::max(largest, bytes.all());
  }
  ASSERT_GT(most.all(), largest + (std::size_t{4} << 20)) << "more than pages";
  EXPECT_GE(bytes_lent(ranks), most.all());
}

TEST_F(PeerSetUpTest, LinksAreTimed) {
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
TEST_F(PeerSetUpTest, NcclIsLoadedWhenMessagesAreNeeded) {
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
TEST_F(PeerSetUpTest, IsTheWayOfRanksWithAGpuEach) {
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
TEST_F(PeerSetUpTest, OneRankThatCannotLeavesAllWithMessages) {
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
