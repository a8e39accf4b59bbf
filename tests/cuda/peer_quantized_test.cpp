// Layers that quantize rows before they travel where there are enough of them. One GPU does here
// for all ranks, and then all that there are.
#include <gtest/gtest.h>

#include <algorithm>

#include "launches.h"
#include "peer_ranks.h"

namespace fusedmoe::testing {
namespace {

constexpr std::int64_t kMost = 256;
constexpr int kRanks = 4;

class PeerQuantizedTest : public CudaTest {
 protected:
  /// Small layers quantize their rows, and later have them beside the experts, from some dozens of
  /// tokens on.
  static void SetUpTestSuite() {
    RankCosts costs = default_rank_costs();
    costs.peer_memory.dispatch.bytes_per_us = 1;
    costs.quantize = {3e4, 1e6, ""};
    costs.beside_experts = {8e4, 1e6, ""};
    use_rank_costs(costs);
  }
};

using Layers = std::vector<std::unique_ptr<MoeLayer>>;

/// Kernels and copies of a step of all ranks.
std::size_t launches_of(const Layers& layers, const std::vector<PeerBuffers>& buffers,
                        std::int64_t most) {
  const OwnedStream stream(kGpu);
  ForwardOptions options;
  options.stream = stream;
  options.max_tokens = most;
  return Launches(stream, [&] { run_all(layers, buffers, options); }).all;
}

struct Travelling {
  const char* scheme;
  DType dtype = DType::kBF16;
  double scale = 1;  // of hidden states
  bool weight_on_input = false;
  bool batch_invariant = false;
};

/// What the test compares: layers that may choose, and those that are told.
struct Compared {
  Layers open, as_is, quantized;

  Compared(const PeerRanks& ranks, const Travelling& how) {
    Case spec = small_case(how.scheme);
    spec.weight_on_input = how.weight_on_input;
    if (how.weight_on_input) spec.topk = 1;
    const LayerWeights weights = make_layer_weights({spec});
    const auto make = [&](std::optional<DType> dispatched) {
      return ranks.make(weights, kMost, how.batch_invariant, [&](int, LayerOptions& options) {
        options.dtype = how.dtype;
        options.ranks.dispatch_dtype = dispatched;
      });
    };
    open = make({});
    as_is = make(how.dtype);
    quantized = make(spec.scheme.activations->value);
  }
};

/// Rooms for one token less than what brings a change, and for as many.
std::vector<std::int64_t> rooms_of(const MoeLayer& layer) {
  std::vector<std::int64_t> rooms{1, kMost};
  for (const char* before : {"; quantized from ", "; beside the experts from "}) {
    const std::int64_t from = tokens_behind(layer, before);
    if (from > 1) rooms.insert(rooms.end(), {from - 1, from});
  }
  return rooms;
}

void expect_same_bits(int gpus) {
  const PeerRanks ranks(kRanks, gpus);
  ranks.reserve(std::size_t{64} << 20);
  for (const Travelling& how : {Travelling{"fp8_block"},
                                {"fp8_block", DType::kF16},
                                {"fp8_block", DType::kF16, 1e-6},
                                {"fp8_block", DType::kBF16, 1, true},
                                {"fp8_block", DType::kBF16, 1, false, true},
                                {"fp8_channel_token"},
                                {"fp8_channel_token", DType::kF16, 1e-6},
                                {"fp8_tensor_static"},
                                {"mxfp8"},
                                {"mxfp8", DType::kBF16, 1, false, true},
                                {"mxfp4_mxfp8"},
                                {"mxfp4:ocp"},
                                {"w4a8"}}) {
    SCOPED_TRACE(std::string(how.scheme) + " " + std::string(name(how.dtype)) + " of " +
                 std::to_string(how.scale) + (how.weight_on_input ? " weighted" : "") +
                 (how.batch_invariant ? " per slot" : ""));
    const Compared layers(ranks, how);
    ASSERT_FALSE(::testing::Test::HasFailure());
    const std::int64_t from = tokens_behind(*layers.open[0], "; quantized from ");
    ASSERT_GT(from, 1) << rows_travel(*layers.open[0]);
    for (const auto* told : {&layers.as_is, &layers.quantized}) {
      EXPECT_EQ(tokens_behind(*told->front(), "; quantized from "), 0);
    }
    for (const std::int64_t room : rooms_of(*layers.open[0])) {
      SCOPED_TRACE(room);
      const auto run = [&](const Layers& each, bool fixed_sizes) {
        std::vector<PeerBuffers> buffers;
        std::vector<Tensor> outputs;
        for (int r = 0; r < kRanks; ++r) {
          const std::int64_t tokens = r == 1 ? 0 : std::max<std::int64_t>(room - 7 * r, 1);
          buffers.emplace_back(*each[r], tokens, kMost);
          buffers[r].fill(random_tensor(how.dtype, {tokens, kHidden}, how.scale, 70 + r));
        }
        ForwardOptions options;
        options.max_tokens = room;
        options.fixed_sizes = fixed_sizes;
        run_all(each, buffers, options);
        wait_for_all(each);
        for (int r = 0; r < kRanks; ++r) {
          ranks.communicators[r]->check();
          outputs.push_back(to_host(buffers[r].output));
        }
        // A graph of all ranks needs one GPU.
        return std::pair(outputs, gpus == 1 ? launches_of(each, buffers, room) : 0);
      };
      for (const bool fixed_sizes : {false, true}) {
        const auto [open, launches] = run(layers.open, fixed_sizes);
        const auto [as_is, launches_as_is] = run(layers.as_is, fixed_sizes);
        const auto [quantized, launches_quantized] = run(layers.quantized, fixed_sizes);
        EXPECT_EQ(launches, room < from ? launches_as_is : launches_quantized);
        // Of more, rows as they are may come beside the experts, and others not yet.
        if (room <= from && gpus == 1) {
          EXPECT_NE(launches_quantized, launches_as_is);
        }
        for (int r = 0; r < kRanks; ++r) {
          EXPECT_TRUE(bitwise_equal(open[r], as_is[r])) << "rank " << r;
          EXPECT_TRUE(bitwise_equal(open[r], quantized[r])) << "rank " << r;
        }
      }
    }
  }
}

TEST_F(PeerQuantizedTest, RowsGiveTheSameBitsHoweverTheyTravel) {
  for (const int gpus : gpu_counts()) {
    SCOPED_TRACE(std::to_string(gpus) + " GPUs");
    expect_same_bits(gpus);
  }
}

/// Graphs of both forms and other forwards follow each other. The bits of batch-invariant layers do
/// not depend on how much room there is.
TEST_F(PeerQuantizedTest, StepsOfBothFormsFollowEachOther) {
  const PeerRanks ranks(kRanks);
  const Compared layers(ranks, {.scheme = "fp8_block", .batch_invariant = true});
  const std::int64_t from = tokens_behind(*layers.open[0], "; quantized from ");
  ASSERT_GT(from, 1) << rows_travel(*layers.open[0]);
  const std::int64_t rooms[] = {from - 1, from};
  std::vector<PeerBuffers> buffers;
  for (int r = 0; r < kRanks; ++r) {
    buffers.emplace_back(*layers.open[r], from - 1 - r, kMost);
    buffers[r].fill(random_tensor(DType::kBF16, buffers[r].x.shape(), 1, 70 + r));
  }
  const OwnedStream stream(kGpu);
  ForwardOptions options;
  options.stream = stream;
  const auto run = [&](std::int64_t room) {
    options.max_tokens = room;
    run_all(layers.open, buffers, options);
  };
  std::vector<Tensor> first;
  for (const std::int64_t room : rooms) run(room);
  synchronize(stream);
  for (const PeerBuffers& own : buffers) first.push_back(to_host(own.output));
  const Graph few(stream, [&] { run(rooms[0]); }), many(stream, [&] { run(rooms[1]); });
  for (int i = 0; i < 60; ++i) {
    (i % 2 == 0 ? few : many).launch(stream);
    if (i % 5 == 4) run(rooms[i % 3 % 2]);
    if (i % 6 != 5) continue;
    synchronize(stream);
    for (int r = 0; r < kRanks; ++r) {
      ranks.communicators[r]->check();
      ASSERT_TRUE(bitwise_equal(to_host(buffers[r].output), first[r])) << "rank " << r << ", " << i;
    }
  }
}

}  // namespace
}  // namespace fusedmoe::testing
