// Layers that choose for each forward how rows travel between the GPUs of a host: through peer
// memory up to some number of tokens, then as messages over NCCL.
#include <gtest/gtest.h>

#include <string>

#include "moe/peer_memory.h"
#include "peer_ranks.h"

namespace fusedmoe::testing {
namespace {

constexpr std::int64_t kMost = 256;

class PeerChoiceTest : public CudaTest {
 protected:
  /// Messages of small layers are faster from some dozens of tokens on.
  static void SetUpTestSuite() {
    RankCosts costs = default_rank_costs();
    costs.peer_memory.dispatch.bytes_per_us = 1000;
    for (RowCosts* messages : {&costs.all2all, &costs.allgather_reducescatter}) {
      messages->dispatch = messages->per_rank = {20, 1e9, ""};
    }
    use_rank_costs(costs);
  }
};

TEST_F(PeerChoiceTest, OneLayerGoesBothWays) {
  setenv("NCCL_NVLS_ENABLE", "0", 0);  // before NCCL is loaded
  if (cuda_device_count() < 2 || !nccl_info().problem.empty()) {
    GTEST_SKIP() << "needs two GPUs and NCCL";
  }
  for (const char* scheme : {"bf16", "fp8_block", "mxfp4_w4a16"}) {
    const LayerWeights weights = make_layer_weights({small_case(scheme)});
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      SCOPED_TRACE(std::string(scheme) + " " + transport);
      const auto control = make_thread_control_plane();
      run_ranks(2, [&](int rank) {
        const Device device{DeviceKind::kCuda, rank};
        const auto communicator = make_communicator(rank, 2, control, {kPatient, device});
        LayerOptions options = options_of(device, false);
        const MoeLayer alone(weights, options);
        options.require += std::string("+") + transport;
        options.ranks.communicator = communicator;
        options.ranks.max_tokens_per_rank = kMost;
        const MoeLayer layer(weights, options);
        const std::int64_t most = tokens_behind(layer, "peer memory up to ");
        ASSERT_GT(most, 2) << rows_travel(layer);
        ASSERT_LT(most, kMost) << rows_travel(layer);
        EXPECT_NE(rows_travel(layer).find(
                      " tokens, then messages over nccl, which are predicted to be faster"),
                  std::string::npos)
            << rows_travel(layer);
        bool by_peers = false;
        for (const std::int64_t room : {most + 1, kMost, most, most + 1, most}) {
          by_peers = by_peers || room <= most;
          for (const bool fixed_sizes : {false, true}) {
            const Tensor x = random_tensor(DType::kBF16, {room - rank, kHidden}, 1, 70 + rank);
            const Tensor output = forward(layer, x, room, nullptr, fixed_sizes);
            expect_as_one(output, forward(alone, x, 0), false, rank);
            EXPECT_EQ(communicator->peers()->is_used(), by_peers) << room << " tokens";
          }
        }
      });
    }
  }
}

}  // namespace
}  // namespace fusedmoe::testing
