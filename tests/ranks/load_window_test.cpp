// LoadWindow: the router's histograms of the last forwards, of one rank and of all.
#include "error_text.h"
#include "fusedmoe/balance.h"
#include "rank_layers.h"

namespace fusedmoe::load_window_test {

using testing::has;
using testing::kPatient;
using testing::run_ranks;

using Loads = std::vector<double>;

void add(LoadWindow& window, std::int64_t layer, const std::vector<std::int32_t>& counts) {
  window.add(layer, borrow(counts.data(), DType::kI32, {static_cast<std::int64_t>(counts.size())}));
}

TEST(LoadWindowTest, SumsTheLastForwardsOfEachLayer) {
  LoadWindow window(2, 3, 2);
  EXPECT_EQ(window.loads(), Loads(6, 0.0));
  add(window, 0, {1, 2, 3});
  add(window, 0, {10, 0, 0});
  add(window, 1, {7, 7, 7, 99});  // a zero expert is none
  EXPECT_EQ(window.loads(), Loads({11, 2, 3, 7, 7, 7}));
  add(window, 0, {0, 0, 100});
  EXPECT_EQ(window.loads(), Loads({10, 0, 100, 7, 7, 7}));
  window.clear();
  add(window, 1, {0, 1, 0});
  EXPECT_EQ(window.loads(), Loads({0, 0, 0, 0, 1, 0}));
}

TEST(LoadWindowTest, RefusesWhatDoesNotFit) {
  LoadWindow window(2, 3, 4);
  EXPECT_EQ(testing::argument_of([&] { add(window, 2, {1, 2, 3}); }), "layer");
  EXPECT_EQ(testing::argument_of([&] { add(window, 0, {1, 2}); }), "expert_load");
  EXPECT_EQ(testing::argument_of([&] { window.add(0, Tensor::zeros({3}, DType::kF32)); }),
            "expert_load");
  EXPECT_EQ(testing::argument_of([] { LoadWindow(1, 0, 1); }), "num_experts");
  EXPECT_EQ(testing::argument_of([] { LoadWindow(1, 1 << 20, 1 << 20); }), "num_forwards");
}

/// A layer's loads, of all ranks, become a placement that all agree on, and experts move there.
TEST(LoadWindowTest, LeadsToAMoveOfAllRanks) {
  constexpr std::int64_t kTokens = 8, kExperts = 6;
  const auto comms = testing::make_communicators(2, true, {kPatient});
  const testing::RankCase how{.size = 2};
  run_ranks(2, [&](int rank) {
    MoeLayer layer(testing::small_weights(),
                   testing::rank_options(how, DType::kBF16, kTokens, comms[rank]));
    LoadWindow window(1, kExperts, 3);
    const Tensor load = Tensor::zeros({kExperts}, DType::kI32);
    const Tensor x = testing::random_tensor(DType::kBF16, {kTokens, 64}, 1, 5 + rank);
    const Tensor output = Tensor::empty(x.shape(), x.dtype());
    const testing::Scratch scratch(layer, kTokens);
    ForwardOptions options;
    options.expert_load = load;
    for (int step = 0; step < 5; ++step) {
      layer.forward(x, output, scratch.workspace, options);
      window.add(0, load);
    }
    const Loads loads = window.loads(*comms[rank]);
    double total = 0;
    for (const double each : loads) total += each;
    EXPECT_EQ(total, 2 * 3 * kTokens * layer.config().topk);
    const auto balanced =
        balance(loads, kExperts, {.num_ranks = 2, .placements = {*layer.placement()}});
    layer.start_move(balanced[0].placement);
    layer.commit_move();
    layer.forward(x, output, scratch.workspace, options);
  });
}

TEST(LoadWindowTest, RanksMustHaveTheSameSizes) {
  const auto comms = testing::make_communicators(2, true, {kPatient});
  run_ranks(2, [&](int rank) {
    const LoadWindow window(1, 3 + rank, 2);
    const std::string error = testing::error_text([&] { window.loads(*comms[rank]); });
    EXPECT_TRUE(has(error, "loads of rank 1: was 32 bytes; must be 24")) << error;
  });
}

}  // namespace fusedmoe::load_window_test
