// A rank loads its own experts and never reads the bytes of the others'.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "checkpoint_parts.h"
#include "error_text.h"
#include "fusedmoe/checkpoint.h"
#include "golden.h"
#include "rank_layers.h"

namespace fusedmoe::loading_test {

using testing::bitwise_equal;
using testing::forward_exactly;
using testing::golden_names;
using testing::golden_path;
using testing::kPatient;
using testing::one_rank_options;
using testing::rank_options;
using testing::RankCase;
using testing::run_ranks;

/// Every family, loaded in parts, on three ranks that hold different experts. Then rank 2 leaves,
/// and the others read its experts.
TEST(LoadingTest, EveryFamilyGivesTheBitsOfOneRank) {
  for (const std::string& name : golden_names()) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint = Checkpoint::open(golden_path(name));
    const std::int64_t index = checkpoint.moe_layers().front();
    const LayerWeights whole = checkpoint.load_layer(index);
    const std::int64_t num_experts = whole.router.num_experts;
    const RankCase how{.size = 3,
                       .placement = ExpertPlacement::round_robin(num_experts, 3),
                       .batch_invariant = true};
    const MoeLayer alone(whole, one_rank_options(how, DType::kBF16));
    const auto comms = make_thread_communicators(3, {kPatient});
    const auto left = make_thread_communicators(2, {kPatient});
    run_ranks(3, [&](int rank) {
      const ParallelConfig parallel =
          ParallelConfig::of({.dp_size = 3, .expert_parallel = true, .rank = rank});
      const LayerWeights part = checkpoint.load_layer(index, parallel, how.placement);
      MoeLayer layer(part, rank_options(how, DType::kBF16, 4, comms[rank]));
      const Tensor x =
          testing::random_tensor(DType::kBF16, {rank + 1, whole.experts.hidden}, 1, 8 + rank);
      const Tensor expected = forward_exactly(alone, x, 0);
      EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, 4), expected));
      if (rank == 2) return;
      layer.rebind(left[rank], ExpertPlacement::linear(num_experts, 2), [&](std::int64_t expert) {
        EXPECT_EQ(expert % 3, 2);
        return checkpoint.load_expert(index, expert);
      });
      EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, 4), expected));
    });
    EXPECT_EQ(testing::argument_of([&] { checkpoint.load_expert(index, num_experts); }), "expert");
  }
}

TEST(LoadingTest, OtherRanksBytesAreNeverRead) {
  // Scales of expert 0 that cannot be: who reads them says so.
  testing::Parts parts("gpt_oss_mxfp4");
  std::vector<Tensor> changed;
  for (auto& [name, view] : parts.tensors) {
    if (name.find("_scales") == std::string::npos) continue;
    changed.push_back(Tensor::empty(view.shape(), view.dtype()));
    std::memcpy(changed.back().data(), view.data(), static_cast<std::size_t>(view.nbytes()));
    std::memset(changed.back().data(), 255, static_cast<std::size_t>(view.nbytes() / view.size(0)));
    view = changed.back();
  }
  ASSERT_FALSE(changed.empty());
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("fusedmoe_loading_" + std::to_string(getpid()));
  parts.save(path);
  const Checkpoint checkpoint = Checkpoint::open(path);
  const std::int64_t index = checkpoint.moe_layers().front();
  const auto load = [&](int rank) {
    checkpoint.load_layer(
        index, ParallelConfig::of({.dp_size = 2, .expert_parallel = true, .rank = rank}));
  };
  EXPECT_THROW(checkpoint.load_layer(index), Error);
  EXPECT_THROW(load(0), Error);
  EXPECT_NO_THROW(load(1));
  std::filesystem::remove(path);
}

}  // namespace fusedmoe::loading_test
