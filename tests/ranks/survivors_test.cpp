// Layers that go on with the ranks that are left when one has failed.
#include <chrono>
#include <csignal>
#include <stdexcept>

#include "fusedmoe/quant.h"
#include "moving.h"
#include "processes.h"

namespace fusedmoe::survivors_test {

using testing::bitwise_equal;
using testing::Breaking;
using testing::Case;
using testing::Communicators;
using testing::expect_as_made_anew;
using testing::forward_exactly;
using testing::has;
using testing::hidden_states_of;
using testing::kNumExperts;
using testing::kPatient;
using testing::kTokens;
using testing::make_communicators;
using testing::make_layer_weights;
using testing::one_rank_options;
using testing::random_placement;
using testing::rank_options;
using testing::RankCase;
using testing::run_ranks;
using testing::small_weights;
using testing::source_of;

/// All ranks go on, with a new communicator.
TEST(SurvivorsTest, AMoveThatBreaksOffLeavesTheOldPlacement) {
  const LayerWeights weights = small_weights();
  const RankCase how{.size = 2, .batch_invariant = true};
  const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
  const auto control = make_thread_control_plane();
  const auto planes = make_thread_data_planes(2);
  const Communicators again = make_communicators(2, false, {kPatient});
  run_ranks(2, [&](int rank) {
    std::shared_ptr<DataPlane> plane = std::make_shared<testing::MessagesOnly>(planes[rank]);
    if (rank == 1) plane = std::make_shared<Breaking>(std::move(plane));
    const auto all = std::make_shared<Communicator>(rank, 2, control, std::move(plane),
                                                    CommunicatorOptions{kPatient});
    MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, all));
    const auto before = layer.placement();
    std::string error;
    try {
      layer.start_move(ExpertPlacement::round_robin(kNumExperts, 2));
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    EXPECT_TRUE(has(error, "the cable is cut")) << error;
    EXPECT_EQ(layer.placement(), before);
    layer.rebind(again[rank], *before);
    const Tensor x = hidden_states_of(rank, 3);
    EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), forward_exactly(alone, x, 0)));
  });
}

class Survivors : public ::testing::TestWithParam<testing::Way> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Survivors, ::testing::ValuesIn(testing::kWays), testing::name_of);

/// While rank 1 is gone the others begin a move; then they go on without it.
TEST_P(Survivors, GoOn) {
  const RankCase how{.size = 3,
                     .transport = GetParam().transport,
                     .lend = GetParam().lend,
                     .placement = random_placement(0),
                     .batch_invariant = true};
  const auto options_on = [&](const std::shared_ptr<Communicator>& communicator) {
    return rank_options(how, DType::kBF16, kTokens, communicator);
  };
  const LayerWeights weights = small_weights();
  const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
  const Communicators comms = make_communicators(3, how.lend, {kPatient});
  const Communicators left = make_communicators(2, how.lend, {kPatient});
  const ExpertPlacement moved(kNumExperts, 2, {5, 4, 3, 2, 1, 0, 3}, {1, 0, 0, 1, 0, 0, 1});
  run_ranks(3, [&](int rank) {
    MoeLayer layer(weights, options_on(comms[rank]));
    layer.start_move(random_placement(2));
    layer.commit_move();
    if (rank == 1) return comms[1]->abort("a core is gone");
    const std::string error = testing::error_text([&] { layer.start_move(random_placement(3)); });
    EXPECT_TRUE(has(error, "a core is gone")) << error;
    EXPECT_EQ(layer.placement(), random_placement(2));
    const int survivor = rank / 2;
    layer.rebind(left[survivor], moved, source_of(weights));
    for (int step = 0; step < 4; ++step) {
      const Tensor x = hidden_states_of(rank + step, (rank + step) % 4);
      EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), forward_exactly(alone, x, 0)));
      if (step == 1) {
        layer.start_move({kNumExperts, 2, {0, 1, 2, 3, 4, 5, 3}, {1, 0, 0, 1, 0, 0, 1}});
      }
      if (step == 2) layer.commit_move();
    }
    expect_as_made_anew(layer, weights, options_on(left[survivor]));
  });
}

TEST(SurvivorsTest, OfEveryScheme) {
  for (const char* name : {"mxfp4_w4a16", "fp8_tensor_static", "int4_g32_zp", "nvfp4", "w4a8"}) {
    SCOPED_TRACE(name);
    Case spec;
    spec.num_experts = kNumExperts;
    spec.scheme = parse_scheme(name);
    spec.bias = true;
    const LayerWeights weights = make_layer_weights({spec});
    const Communicators comms = make_communicators(3, true, {kPatient});
    const Communicators left = make_communicators(2, true, {kPatient});
    run_ranks(3, [&](int rank) {
      MoeLayer layer(weights, rank_options({.size = 3}, DType::kBF16, kTokens, comms[rank]));
      if (rank == 2) return;
      layer.rebind(left[rank], ExpertPlacement::round_robin(kNumExperts, 2), source_of(weights));
      expect_as_made_anew(layer, weights,
                          rank_options({.size = 2}, DType::kBF16, kTokens, left[rank]));
    });
  }
}

/// Copies make the loss of a rank bearable without a checkpoint; without them it is an Error.
TEST(SurvivorsTest, ExpertsThatAreNowhereAreAnError) {
  const LayerWeights weights = small_weights();
  RankCase how{.size = 2};
  how.placement =
      ExpertPlacement(kNumExperts, 2, {0, 1, 2, 3, 4, 5, 3, 4}, {0, 0, 0, 0, 0, 1, 1, 1});
  const Communicators comms = make_communicators(2, true, {kPatient});
  const Communicators left = make_thread_communicators(1);
  run_ranks(2, [&](int rank) {
    MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, comms[rank]));
    if (rank == 1) return comms[1]->abort("gone");
    const ExpertPlacement all = ExpertPlacement::linear(kNumExperts, 1);
    const std::string error = testing::error_text([&] { layer.rebind(left[0], all); });
    EXPECT_TRUE(has(error, "placement has expert 5, which none of these ranks has")) << error;
    layer.rebind(left[0], all, [&](std::int64_t expert) {
      EXPECT_EQ(expert, 5);
      return source_of(weights)(expert);
    });
    const MoeLayer alone(weights, one_rank_options({}, DType::kBF16));
    const Tensor x = hidden_states_of(0, 4);
    EXPECT_TRUE(bitwise_equal(forward_exactly(layer, x, kTokens), forward_exactly(alone, x, 0)));
  });
}

/// As the last survivor of a layer on GPUs has them, without arenas.
TEST(SurvivorsTest, OneRankHasLanesToo) {
  const LayerWeights weights = small_weights();
  LayerOptions options = one_rank_options({}, DType::kBF16);
  options.ranks.communicator = make_thread_communicators(1).front();
  options.ranks.lanes = 2;
  const MoeLayer layer(weights, options);
  const Tensor x = hidden_states_of(0, 4), output = Tensor::empty(x.shape(), x.dtype());
  const std::size_t bytes = layer.workspace_bytes(4);
  const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  ForwardOptions second;
  second.lane = 1;
  layer.forward(x, output, {workspace.data(), bytes}, second);
  EXPECT_TRUE(bitwise_equal(output, forward_exactly(layer, x, 0)));
  options.ranks.lanes = 9;
  EXPECT_EQ(testing::error_text([&] { MoeLayer(weights, options); }),
            "options.ranks.lanes: was 9; must be 1 to 8");
}

#if !defined(__SANITIZE_THREAD__)  // which refuses threads after a fork
/// The same in all processes.
using Clock = std::chrono::steady_clock;

/// A communicator of processes, over TCP: one that ends is noticed at once.
std::shared_ptr<Communicator> join(int rank, int size, ControlPlane& texts, const std::string& name,
                                   bool shared_memory) {
  int calls = 0;
  const auto gather = [&](const std::string& text) {
    const std::string call = name + std::to_string(calls++) + "/";
    texts.post(call + std::to_string(rank), text);
    std::vector<std::string> all;
    for (int r = 0; r < size; ++r) {
      all.push_back(texts.read(call + std::to_string(r), kPatient).value());
    }
    return all;
  };
  CommunicatorOptions options{kPatient};
  options.shared_memory = shared_memory;
  return make_communicator(rank, size, make_control_plane(rank, size, gather, kPatient), options);
}

/// Over memory that they share, and over TCP. Rank 1 is killed while experts move; the others name
/// it in time and go on.
TEST(SurvivorsTest, ProcessesMoveExpertsAndGoOn) {
  const LayerWeights weights = small_weights();
  const RankCase how{.size = 3, .placement = random_placement(0), .batch_invariant = true};
  for (const bool shared_memory : {true, false}) {
    const auto serve = [&](int rank, ControlPlane& texts) {
      const MoeLayer alone(weights, one_rank_options(how, DType::kBF16));
      const auto forward = [&](const MoeLayer& layer, int step) {
        const Tensor x = hidden_states_of(rank + step, (rank + step) % 4);
        if (bitwise_equal(forward_exactly(layer, x, kTokens), forward_exactly(alone, x, 0))) return;
        throw std::runtime_error("other bits in step " + std::to_string(step));
      };
      const auto all = join(rank, 3, texts, "all", shared_memory);
      MoeLayer layer(weights, rank_options(how, DType::kBF16, kTokens, all));
      for (int step = 0; step < 20; ++step) {
        if (step % 5 == 1) layer.start_move(random_placement(step));
        if (step % 5 == 3) layer.commit_move();
        forward(layer, step);
      }
      std::jthread killer;
      if (rank == 1) {
        killer = std::jthread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          texts.post("killed", std::to_string(Clock::now().time_since_epoch().count()));
          std::raise(SIGKILL);
        });
      }
      const std::string error = testing::error_text([&] {
        for (std::uint64_t move = 20;; ++move) {
          layer.start_move(random_placement(move));
          layer.commit_move();
        }
      });
      const Clock::time_point end = Clock::now();
      const std::string killed_at = texts.read("killed", kPatient).value();
      const Clock::time_point killed{Clock::duration(std::stoll(killed_at))};
      if (end - killed > testing::kAtOnce) throw std::runtime_error("rank 1 was named too late");
      if (!has(error, "rank 1")) throw std::runtime_error("no word of rank 1: " + error);
      const auto left = join(rank / 2, 2, texts, "left", shared_memory);
      layer.rebind(left, ExpertPlacement::round_robin(kNumExperts, 2), source_of(weights));
      for (int step = 0; step < 5; ++step) forward(layer, step);
      left->barrier();
    };
    const auto texts = testing::texts_of_processes(
        3, [&](int rank, const std::shared_ptr<ControlPlane>& control) -> std::string {
          try {
            serve(rank, *control);
          } catch (const std::exception& error) {
            return error.what();
          }
          return "went on";
        });
    EXPECT_EQ(texts[0], "went on");
    EXPECT_EQ(texts[1], testing::kDied);
    EXPECT_EQ(texts[2], "went on");
  }
}
#endif

}  // namespace fusedmoe::survivors_test
