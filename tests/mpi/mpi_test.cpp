// Layers on the processes of an MPI job: each process compares its own output with what one rank
// computes.
#include <gtest/gtest.h>

#include <utility>

#include "dropping_ranks.h"
#include "fusedmoe/quant.h"
#include "golden_ranks.h"
#include "mpi_ranks.h"

namespace fusedmoe::mpi_test {

using testing::bitwise_equal;
using testing::Case;
using testing::compare;
using testing::forward_exactly;
using testing::make_layer_weights;
using testing::one_rank_options;
using testing::random_tensor;
using testing::rank_options;
using testing::RankCase;
using testing::shares;
using testing::world;

constexpr std::int64_t kTokens = 9;

TEST(MpiTest, ExpertsMove) {
  const int size = world()->size();
  if (size == 1) GTEST_SKIP() << "nobody to share experts with";
  const LayerWeights weights = make_layer_weights(
      {Case{.num_experts = 2 * size, .topk = 3, .hidden = 128, .intermediate = 128}});
  const RankCase how{.size = size, .batch_invariant = true};
  const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
  MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, world()));
  const Tensor x = random_tensor(DType::kBF16, {kTokens, 128}, 1, 70 + world()->rank());
  const Tensor expected = forward_exactly(alone, x, 0);
  for (const ExpertPlacement& placement :
       {ExpertPlacement::round_robin(2 * size, size), ExpertPlacement::linear(2 * size, size)}) {
    layer.start_move(placement);
    EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), expected));
    layer.commit_move();
    EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), expected));
  }
}

/// Blocks lie one behind the other, so one that is taken in the middle of a forward shows where the
/// forward's ends. Blocks are whole pages.
TEST(MpiTest, SharedBytesAreWhatAForwardTakes) {
  constexpr std::int64_t kMost = 100;
  constexpr std::size_t kPage = 4096;
  Case spec{.num_experts = 7, .topk = 3, .hidden = 128, .intermediate = 128};
  const LayerWeights weights = make_layer_weights({spec});
  RankCase how{.size = world()->size()};
  EXPECT_EQ(MoeLayer(weights, one_rank_options(how, DType::kBF16)).shared_bytes(kMost), 0U);
  if (world()->size() == 1) GTEST_SKIP() << "nobody to share memory with";
  for (const char* transport : {"all2all", "allgather_reducescatter"}) {
    for (const int mode : {0, 1, 2}) {  // per rank; with fixed sizes; per slot
      SCOPED_TRACE(std::string(transport) + " " + std::to_string(mode));
      how.transport = transport;
      how.fixed_sizes = mode == 1;
      how.combine = mode == 2 ? CombineMode::kPerSlot : CombineMode::kPerRank;
      LayerOptions options = rank_options(how, DType::kBF16, kMost, world());
      options.hooks = true;
      const MoeLayer layer(weights, options);
      EXPECT_EQ(layer.shared_bytes(kMost) > 0, shares());
      std::size_t taken = 0, calls = 0;
      const auto page = [] {
        void* const block = world()->take_shared(1);
        world()->give_back_shared(block);
        return static_cast<const char*>(block);
      };
      const char* const begin = shares() ? page() : nullptr;
      ExpertsHooks hooks;
      hooks.after_gemm1 = [&](const HookArgs&) {
        ++calls;
        if (shares()) taken = static_cast<std::size_t>(page() - begin);
      };
      // This rank has as many tokens as there can be, or fewer.
      for (const auto& [most, tokens] :
           {std::pair(kTokens, kTokens), std::pair(kMost, kMost), std::pair(kMost, kTokens)}) {
        const testing::Scratch scratch(layer, most, how.fixed_sizes);
        const Tensor x = random_tensor(DType::kBF16, {tokens, 128}, 1, 40 + world()->rank());
        const Tensor output = Tensor::empty(x.shape(), x.dtype());
        ForwardOptions forward_options;
        forward_options.hooks = &hooks;
        forward_options.max_tokens = most;
        forward_options.fixed_sizes = how.fixed_sizes;
        layer.forward(x, output, scratch.workspace, forward_options);
        const std::size_t pages = (layer.shared_bytes(most) + kPage - 1) / kPage;
        if (tokens == most && shares()) {
          EXPECT_EQ(taken, pages * kPage) << most;
        }
        EXPECT_LE(taken, pages * kPage) << most;
      }
      EXPECT_EQ(calls, 3U);
    }
  }
}

TEST(MpiTest, LayersGiveTheOutputOfOneRank) {
  for (const char* scheme : {"bf16", "mxfp4_w4a16", "fp8_block", "nvfp4", "w4a8"}) {
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      for (const bool invariant : {false, true}) {
        SCOPED_TRACE(std::string(scheme) + " " + transport);
        Case spec;
        spec.num_experts = 7;
        spec.topk = 3;
        spec.hidden = spec.intermediate = 128;
        spec.scheme = parse_scheme(scheme);
        const LayerWeights weights = make_layer_weights({spec});
        const RankCase how{.size = world()->size(),
                           .transport = transport,
                           .placement = ExpertPlacement::linear(7, world()->size(), 2),
                           .batch_invariant = invariant};
        const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
        const MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, world()));
        const int rank = world()->rank();
        for (const std::int64_t tokens : {std::int64_t{rank == 1 ? 0 : kTokens - rank}, kTokens}) {
          const Tensor x = random_tensor(DType::kBF16, {tokens, 128}, 1, 40 + rank);
          const Tensor output = forward_exactly(layer, x, kTokens);
          const Tensor expected = forward_exactly(alone, x, 0);
          if (invariant) {
            EXPECT_TRUE(bitwise_equal(output, expected));
          } else {
            EXPECT_LE(compare(output, expected).max_norm_relative, 2e-2);
          }
        }
      }
    }
  }
}

TEST(MpiTest, DispatchDtypeChangesNoBit) {
  const int rank = world()->rank();
  for (const auto& [scheme, activations] :
       {std::pair("fp8_block", DType::kE4M3), std::pair("mxfp4:ocp", DType::kE2M1)}) {
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      SCOPED_TRACE(std::string(scheme) + " " + transport);
      Case spec{.num_experts = 7, .topk = 3, .hidden = 128, .intermediate = 128};
      spec.scheme = parse_scheme(scheme);
      const LayerWeights weights = make_layer_weights({spec});
      RankCase how{.size = world()->size(), .transport = transport, .batch_invariant = true};
      const Tensor x = random_tensor(DType::kBF16, {rank == 1 ? 0 : kTokens, 128}, 1, 40 + rank);
      const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
      const Tensor expected = forward_exactly(alone, x, 0);
      for (const DType dtype : {DType::kBF16, activations}) {
        how.dispatch_dtype = dtype;
        const MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, world()));
        EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), expected)) << name(dtype);
      }
    }
  }
}

TEST(MpiTest, GoldenVectorsOfEveryFamily) {
  for (const std::string& name : testing::golden_names()) {
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      for (const CombineMode combine : {CombineMode::kPerRank, CombineMode::kPerSlot}) {
        const RankCase how{.size = world()->size(), .transport = transport, .combine = combine};
        testing::expect_golden_on_rank(name, how, DType::kBF16, world());
      }
    }
  }
}

TEST(MpiTest, RowsThatDoNotFitAreDropped) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    testing::DropProblem(world()->size(), seed).expect_on_rank(world());
  }
}

TEST(MpiTest, TensorParallelRanksAddTheirSlices) {
  const LayerWeights weights = make_layer_weights({Case{.intermediate = 256}});
  const RankCase how{.size = world()->size(),
                     .transport = "no_ep",
                     .deployment = Deployment{.tp_size = world()->size()}};
  const LayerOptions options = rank_options(how, DType::kBF16, 0, world());
  const MoeLayer layer(local_weights(weights, options.parallel), options);
  const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
  const Tensor x = random_tensor(DType::kBF16, {5, 64}, 1, 4);
  EXPECT_LE(compare(layer.forward(x), alone.forward(x)).max_norm_relative, 2e-2);
}

}  // namespace fusedmoe::mpi_test
