// Experts move between GPUs while the layer runs many forwards: start_move() brings them beside
// forwards, commit_move() comes between two. Every output has the bits that one GPU gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../unit/error_text.h"
#include "moving_layers.h"

namespace fusedmoe::testing {
namespace {

constexpr int kForwards = 1000, kMoves = 10, kInputs = 4;
/// Forwards that are enqueued before the host waits for them.
constexpr int kAhead = 10;

class CudaMovesForwardsTest : public CudaTest {};

/// Starts moves to other placements on `size` ranks. The caller drives `driven` of these ranks;
/// each has a thread that brings its experts.
class Movers {
 public:
  using Move = std::function<void(int rank, const ExpertPlacement& placement)>;
  Movers(int size, int driven, Move move) : move_(std::move(move)), size_(size), driven_(driven) {}

  void start() {
    here_ = 0;
    const ExpertPlacement placement = random_placement(size_, ++seed_);
    for (int r = 0; r < driven_; ++r) {
      threads_.emplace_back([this, r, placement] {
        EXPECT_EQ(error_text([&] { move_(r, placement); }), "no error");
        ++here_;
      });
    }
  }
  bool are_here() const { return here_ == driven_; }
  void join() { threads_.clear(); }

 private:
  const Move move_;
  const int size_, driven_;
  std::atomic<int> here_{0};
  std::uint64_t seed_ = 0;
  std::vector<std::jthread> threads_;
};

/// What a rank's forwards have left, to be compared when all is done.
class Outputs {
 public:
  explicit Outputs(const MoeLayer& alone, int rank) {
    for (int i = 0; i < kInputs; ++i) {
      inputs_.push_back(to_device(input_of(rank, i), alone.config().device));
      expected_.push_back(forward(alone, input_of(rank, i), 0));
    }
  }
  const Tensor& input(int step) const { return inputs_[static_cast<std::size_t>(step % kInputs)]; }
  void keep(const Tensor& output, Stream stream) {
    if (free_.empty())
      free_.push_back(Tensor::empty(output.shape(), output.dtype(), output.device()));
    kept_.push_back(free_.back());
    free_.pop_back();
    copy(output, kept_.back(), stream);
  }
  /// All that came since the last time. The stream has done them.
  void compare() {
    for (const Tensor& each : kept_) {
      EXPECT_TRUE(
          bitwise_equal(to_host(each), expected_[static_cast<std::size_t>(step_ % kInputs)]))
          << "step " << step_;
      ++step_;
    }
    free_.insert(free_.end(), kept_.begin(), kept_.end());
    kept_.clear();
  }

 private:
  std::vector<Tensor> inputs_, expected_, kept_, free_;
  int step_ = 0;
};

/// One thread drives all ranks, which share a GPU and map each other's memory. No messages can be
/// sent, so experts come by copies.
TEST_F(CudaMovesForwardsTest, OfRanksThatShareAGpuAndHaveNoDataPlane) {
  const LayerWeights weights = make_layer_weights({small_case("fp8_block")});
  const MoeLayer alone(weights, options_of(kGpu, true));
  for (const auto& [size, replays] :
       {std::pair(2, false), std::pair(2, true), std::pair(4, true)}) {
    SCOPED_TRACE(std::to_string(size) + (replays ? " ranks, replays" : " ranks, forwards"));
    const PeerRanks ranks(size);
    const auto layers = ranks.make(weights, kTokens, true, [&](int, LayerOptions& options) {
      options.ranks.placement = random_placement(ranks.size(), 0);
    });
    std::vector<std::shared_ptr<Communicator>> lanes(size);
    run_ranks(size, [&](int rank) { lanes[rank] = ranks.communicators[rank]->lane(1); });
    EXPECT_EQ(lanes[0]->backend(), "none");
    std::vector<PeerBuffers> buffers;
    std::vector<Outputs> outputs;
    for (int r = 0; r < size; ++r) {
      buffers.emplace_back(*layers[r], tokens_of(r), kTokens);
      outputs.emplace_back(alone, r);
    }
    const OwnedStream stream(kGpu);
    ForwardOptions options;
    options.stream = stream;
    options.max_tokens = kTokens;
    options.fixed_sizes = true;
    run_all(layers, buffers, options);  // loads what it needs
    synchronize(stream);
    std::optional<Graph> graph;
    if (replays) graph.emplace(stream, [&] { run_all(layers, buffers, options); });
    Movers movers(size, size, [&](int rank, const ExpertPlacement& placement) {
      layers[rank]->start_move(placement, *lanes[rank]);
    });
    movers.start();
    int moves = 0;
    for (int step = 0; step < kForwards || moves < kMoves; ++step) {
      for (int r = 0; r < size; ++r) copy(outputs[r].input(step), buffers[r].x, stream);
      graph ? graph->launch(stream) : run_all(layers, buffers, options);
      for (int r = 0; r < size; ++r) outputs[r].keep(buffers[r].output, stream);
      if (step % kAhead != kAhead - 1) continue;
      const bool commits = movers.are_here();  // some forwards are under way then
      synchronize(stream);
      for (int r = 0; r < size; ++r) {
        outputs[r].compare();
        ranks.communicators[r]->check();
      }
      if (!commits) continue;
      movers.join();
      for (const auto& layer : layers) layer->commit_move();
      ++moves;
      movers.start();
    }
    movers.join();
    for (int r = 0; r < size; ++r) EXPECT_EQ(error_text([&] { lanes[r]->check(); }), "no error");
  }
}

/// Each rank is a thread with a stream of its own, and a GPU where there are enough.
TEST_F(CudaMovesForwardsTest, OfRanksWithAStreamEach) {
  const LayerWeights weights = make_layer_weights({small_case("fp8_block")});
  for (const Setting& setting : all_settings()) {
    if (setting.size > 4) continue;
    for (const bool replays : {false, true}) {
      if (replays && !setting.peers) continue;  // no messages of rows for each slot are recorded
      SCOPED_TRACE(setting.name() + (replays ? " replays" : " forwards"));
      Ranks ranks(setting), second(setting);
      run_ranks(setting.size, [&](int rank) {
        const auto communicator = ranks.join(rank), over = second.join(rank);
        const Device device = communicator->device();
        const CurrentDevice current(device);
        LayerOptions options = options_on(communicator, true);
        options.ranks.placement = random_placement(setting.size, 0);
        MoeLayer layer(weights, options);
        const PeerBuffers own(layer, tokens_of(rank), kTokens);
        const OwnedStream stream(device);
        ForwardOptions how;
        how.stream = stream;
        how.max_tokens = kTokens;
        how.fixed_sizes = setting.peers;
        const auto run = [&] { layer.forward(own.x, own.output, own.scratch(), how); };
        Outputs outputs(MoeLayer(weights, options_of(device, true)), rank);
        run();
        synchronize(stream);
        std::optional<Graph> graph;
        if (replays) graph.emplace(stream, run);
        Movers mover(setting.size, 1, [&](int, const ExpertPlacement& placement) {
          layer.start_move(placement, *over);
        });
        communicator->barrier();
        mover.start();
        int moves = 0;
        for (int step = 0; step < kForwards || moves < kMoves; ++step) {
          copy(outputs.input(step), own.x, stream);
          graph ? graph->launch(stream) : run();
          outputs.keep(own.output, stream);
          if (step % kAhead != kAhead - 1) continue;
          const auto texts = communicator->gather(mover.are_here() ? "here" : "not yet", "move");
          synchronize(stream);
          communicator->check();
          outputs.compare();
          if (std::ranges::count(texts, "here") < setting.size) continue;
          mover.join();
          layer.commit_move();
          ++moves;
          mover.start();
        }
        mover.join();
        over->check();
        communicator->barrier();
      });
    }
  }
}

}  // namespace
}  // namespace fusedmoe::testing
