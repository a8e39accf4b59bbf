// Experts of GPUs that move between ranks while the layer serves, and layers that survivors bind
// again: the bits stay those of one GPU. Ranks share a GPU, or have one each where there are
// several.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <string>
#include <thread>

#include "../unit/error_text.h"
#include "moving_layers.h"

namespace fusedmoe::testing {
namespace {

class CudaMovesTest : public CudaTest {};

TEST_F(CudaMovesTest, ForwardsGoOnWithTheBitsOfOneGpu) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const Setting& setting : all_settings()) {
    for (const char* pair : {"sm90+all2all", "sm90+allgather_reducescatter", "sm80+all2all"}) {
      SCOPED_TRACE(setting.name() + " " + pair);
      Ranks ranks(setting);
      run_ranks(setting.size, [&](int rank) {
        const auto communicator = ranks.join(rank);
        const bool exact = std::string(pair).starts_with("sm90");
        LayerOptions options = options_on(communicator, exact, pair);
        options.ranks.placement = random_placement(setting.size, 0);
        LayerOptions of_one = options_of(communicator->device(), exact);
        of_one.require = std::string(pair).substr(0, 4);
        const MoeLayer alone(weights, of_one);
        MoeLayer layer(weights, options);
        for (int step = 0; step < 9; ++step) {
          if (step % 3 == 1) layer.start_move(random_placement(setting.size, step));
          const Tensor x = input_of(rank, step);
          const Tensor output = forward(layer, x, kTokens), expected = forward(alone, x, 0);
          if (exact) {
            EXPECT_TRUE(bitwise_equal(output, expected)) << step;
          } else {
            EXPECT_LE(compare(output, expected).max_norm_relative, kTolerance) << step;
          }
          if (step % 3 == 2) layer.commit_move();
        }
        expect_as_made_anew(layer, weights, options);
        communicator->barrier();
      });
    }
  }
}

/// A move, and then the loss of a rank.
TEST_F(CudaMovesTest, OfSchemesWithAllKindsOfParts) {
  for (const char* scheme : {"fp8_block", "fp8_tensor_static", "mxfp4_w4a16", "nvfp4", "w4a8"}) {
    for (const char* pair : {"sm90+all2all", "sm80+all2all"}) {
      SCOPED_TRACE(std::string(scheme) + " " + pair);
      Case spec = small_case(scheme);
      spec.bias = true;
      const LayerWeights weights = make_layer_weights({spec});
      const CommunicatorOptions patient{kPatient, kGpu};
      const auto all = make_thread_communicators(4, patient),
                 left = make_thread_communicators(3, patient);
      run_ranks(4, [&](int rank) {
        LayerOptions options = options_on(all[rank], false, pair);
        options.ranks.placement = random_placement(4, 0);
        MoeLayer layer(weights, options);
        layer.start_move(random_placement(4, 1));
        layer.commit_move();
        expect_as_made_anew(layer, weights, options);
        all[rank]->barrier();
        if (rank == 3) return;
        layer.rebind(left[rank], ExpertPlacement::round_robin(kExperts, 3), source_of(weights));
        options.ranks.communicator = left[rank];
        expect_as_made_anew(layer, weights, options);
      });
    }
  }
}

/// Experts of a rank that has failed are nowhere, unless somebody gives them; one rank is left.
TEST_F(CudaMovesTest, TheLastSurvivorHasALayerOfOneGpu) {
  const LayerWeights weights = make_layer_weights({small_case("fp8_block")});
  const CommunicatorOptions patient{kPatient, kGpu};
  const auto both = make_thread_communicators(2, patient);
  const auto left = make_thread_communicators(1, patient);
  run_ranks(2, [&](int rank) {
    MoeLayer layer(weights, options_on(both[rank], false));
    if (rank == 1) return both[1]->abort("gone");
    const ExpertPlacement all = ExpertPlacement::linear(kExperts, 1);
    EXPECT_NE(error_text([&] { layer.rebind(left[0], all); }).find("placement has expert 7"),
              std::string::npos);
    layer.rebind(left[0], all, source_of(weights));
    const MoeLayer alone(weights, options_of(kGpu, false));
    expect_same_parts(layer.packed_weights(), alone.packed_weights());
    EXPECT_TRUE(
        bitwise_equal(forward(layer, input_of(0, 1), kTokens), forward(alone, input_of(0, 1), 0)));
  });
}

/// Two of four, which map each other's memory: what these have is copied, the rest is given.
TEST_F(CudaMovesTest, SurvivorsWithoutADataPlaneCopyExperts) {
  const CommunicatorOptions shared{kPatient, kGpu, true, true};
  for (const char* scheme : {"bf16", "fp8_block", "nvfp4"}) {
    SCOPED_TRACE(scheme);
    const LayerWeights weights = make_layer_weights({small_case(scheme)});
    const auto all = communicators_without_data(4, shared),
               left = communicators_without_data(2, shared);
    run_ranks(4, [&](int rank) {
      LayerOptions options = options_on(all[rank], false);
      options.ranks.placement = random_placement(4, 0);
      MoeLayer layer(weights, options);
      all[rank]->barrier();
      if (rank > 1) return;
      options.ranks.communicator = left[rank];
      options.ranks.placement = random_placement(2, 1);
      layer.rebind(left[rank], *options.ranks.placement, source_of(weights));
      const MoeLayer anew(weights, options);
      expect_same_parts(layer.packed_weights(), anew.packed_weights());
    });
  }
}

TEST_F(CudaMovesTest, AMoveThatBreaksOffLeavesTheOldPlacement) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const CommunicatorOptions patient{kPatient, kGpu};
  const auto control = make_thread_control_plane();
  const auto planes = make_thread_data_planes(2, kGpu);
  const auto again = make_thread_communicators(2, patient);
  run_ranks(2, [&](int rank) {
    std::shared_ptr<DataPlane> plane = planes[rank];
    if (rank == 1) plane = std::make_shared<Breaking>(std::move(plane));
    const auto all = std::make_shared<Communicator>(rank, 2, control, std::move(plane), patient);
    const MoeLayer alone(weights, options_of(kGpu, true));
    MoeLayer layer(weights, options_on(all, true));
    std::string error;
    try {
      layer.start_move(other_than_linear());
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    EXPECT_NE(error.find("the cable is cut"), std::string::npos) << error;
    EXPECT_EQ(layer.placement(), ExpertPlacement::linear(kExperts, 2));
    layer.rebind(again[rank], *layer.placement());
    const Tensor x = input_of(rank, 1);
    EXPECT_TRUE(bitwise_equal(forward(layer, x, kTokens), forward(alone, x, 0)));
  });
}

/// Keeps a GPU busy, so that what other streams have begun takes its time.
class Busy {
 public:
  explicit Busy(Device device)
      : thread_([device](const std::stop_token& stop) {
          const Tensor memory = Tensor::empty({std::int64_t{1} << 30}, DType::kU8, device);
          const OwnedStream stream(device);
          while (!stop.stop_requested()) {
            for (int i = 0; i < 4; ++i) fill_bytes(memory, 0, stream);
            synchronize(stream);
          }
        }) {}

 private:
  std::jthread thread_;
};

/// Of ranks that map each other's memory: rank 1 has no room for what comes, or any one of its
/// copies fails, those by which it makes its block, fills it, and gets what the other has. What it
/// has begun then is under way for a while yet, and reads and writes memory of both.
TEST_F(CudaMovesTest, CopiesThatFailOnOneRankLeaveTheOldPlacement) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const MoeLayer alone(weights, options_of(kGpu, true));
  const WatchedRuntime watched(DeviceKind::kCuda);
  const PeerRanks ranks(2);
  const auto layers = ranks.make(weights, kTokens, true);
  std::vector<PeerBuffers> buffers;
  for (int r = 0; r < 2; ++r) buffers.emplace_back(*layers[r], tokens_of(r), kTokens);
  const auto expect_bits = [&](int step) {
    for (int r = 0; r < 2; ++r) buffers[r].fill(input_of(r, step));
    run_all(layers, buffers, {});
    synchronize(Stream{kGpu});
    for (int r = 0; r < 2; ++r) {
      EXPECT_TRUE(bitwise_equal(to_host(buffers[r].output), forward(alone, input_of(r, step), 0)));
    }
  };
  const ExpertPlacement linear = ExpertPlacement::linear(kExperts, 2);
  const auto expect_failure = [&](const RuntimeCalls& fault) {
    SCOPED_TRACE(fault.copies_until_error);
    run_ranks(2, [&](int rank) {
      if (rank == 1) WatchedRuntime::calls = fault;
      const std::string error = error_text([&] { layers[rank]->start_move(other_than_linear()); });
      WatchedRuntime::calls = {};
      EXPECT_NE(error.find("rank 1: "), std::string::npos) << error;
      EXPECT_EQ(layers[rank]->placement(), linear);
    });
    expect_bits(1);
  };
  const Busy busy(kGpu);
  expect_failure({.is_full = true});  // first: moves that end well leave room for the next
  const int copies = copies_of_move(layers, 1);
  for (int n = 0; n < copies; ++n) expect_failure({.copies_until_error = n});
  run_ranks(2, [&](int rank) { layers[rank]->start_move(other_than_linear()); });
  expect_bits(2);
  for (const auto& layer : layers) layer->commit_move();
  expect_bits(3);
}

/// The next forward would wait for cudaMalloc and cudaFree.
TEST_F(CudaMovesTest, ACommitTakesAndFreesNoMemory) {
  const LayerWeights weights = make_layer_weights({small_case("fp8_block")});
  const WatchedRuntime watched(DeviceKind::kCuda);
  const auto all = make_thread_communicators(2, CommunicatorOptions{kPatient, kGpu});
  run_ranks(2, [&](int rank) {
    LayerOptions options = options_on(all[rank], false);
    options.ranks.placement = random_placement(2, 0);
    MoeLayer layer(weights, options);
    for (const std::uint64_t seed : {1, 2, 3}) {
      layer.start_move(random_placement(2, seed));
      RuntimeCalls& calls = WatchedRuntime::calls;
      calls = {};
      layer.commit_move();
      EXPECT_EQ(calls.taken + calls.freed + calls.streams + calls.events, 0);
      EXPECT_EQ(calls.device_waits, 1) << "for forwards that read what is overwritten";
      EXPECT_EQ(calls.waits, 1) << "for the copies";
    }
    expect_as_made_anew(layer, weights, options);
    all[rank]->barrier();
  });
}

TEST_F(CudaMovesTest, ACommitThatFailsHalfWayEndsTheLayer) {
  const LayerWeights weights = make_layer_weights({small_case("fp8_block")});
  int copies = 1;  // of a commit
  for (int until_error = 0; until_error < copies; ++until_error) {
    const WatchedRuntime watched(DeviceKind::kCuda);
    const auto all = make_thread_communicators(2, CommunicatorOptions{kPatient, kGpu});
    run_ranks(2, [&](int rank) {
      MoeLayer layer(weights, options_on(all[rank], false));
      RuntimeCalls& calls = WatchedRuntime::calls;
      layer.start_move(other_than_linear());
      calls = {};
      layer.commit_move();
      if (rank == 1) copies = calls.copies;
      layer.start_move(ExpertPlacement::linear(kExperts, 2));
      all[rank]->barrier();
      calls = {};
      if (rank == 1) calls.copies_until_error = until_error;
      const std::string error = error_text([&] { layer.commit_move(); });
      calls.copies_until_error = -1;
      EXPECT_EQ(calls.waits, 1) << "for the copies, before others get the memory";
      EXPECT_EQ(error.find("the device is broken") != std::string::npos, rank == 1) << error;
      const std::string next = error_text([&] { forward(layer, input_of(rank, 1), kTokens); });
      EXPECT_NE(next.find("rank 1: the device is broken"), std::string::npos) << next;
    });
  }
}

/// A thread of its own brings them over a communicator of its own; the ranks agree on the forward
/// behind which all have theirs.
TEST_F(CudaMovesTest, ExpertsAreBroughtBesideForwards) {
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  for (const Setting& setting : all_settings()) {
    if (setting.size > 4) continue;
    SCOPED_TRACE(setting.name());
    Ranks ranks(setting), second({setting.size, setting.nccl});
    run_ranks(setting.size, [&](int rank) {
      const auto communicator = ranks.join(rank), over = second.join(rank);
      const MoeLayer alone(weights, options_of(communicator->device(), true));
      LayerOptions options = options_on(communicator, true);
      options.ranks.placement = random_placement(setting.size, 0);
      MoeLayer layer(weights, options);
      int step = 0;
      const auto serve = [&] {
        const Tensor x = input_of(rank, step++);
        EXPECT_TRUE(bitwise_equal(forward(layer, x, kTokens), forward(alone, x, 0))) << step;
      };
      serve();
      for (std::uint64_t move = 1; move < 4; ++move) {
        std::atomic<bool> is_here{false};
        std::jthread mover([&] {
          const ExpertPlacement placement = random_placement(setting.size, move);
          EXPECT_EQ(error_text([&] { layer.start_move(placement, *over); }), "no error");
          is_here = true;
        });
        for (bool all_here = false; !all_here;) {
          serve();
          const auto texts = communicator->gather(is_here ? "here" : "not yet", "move");
          all_here = std::ranges::count(texts, "here") == setting.size;
        }
        mover.join();
        layer.commit_move();
        serve();
      }
      expect_as_made_anew(layer, weights, options);
      communicator->barrier();
    });
  }
}

}  // namespace
}  // namespace fusedmoe::testing
