// Steps whose rows come beside the experts, from the memory of the other GPUs. One GPU does here
// for all ranks.
#include <gtest/gtest.h>

#include "../unit/error_text.h"
#include "peer_ranks.h"
#include "testing/random.h"

namespace fusedmoe::testing {
namespace {

constexpr std::int64_t kMost = 512;
constexpr std::chrono::milliseconds kDeadline{2500};

class PeerFetchTest : public CudaTest {
 protected:
  /// Small layers have their rows beside the experts from some hundred tokens on.
  static void SetUpTestSuite() { bring_rows_beside_experts(2e5); }
};

/// From how many tokens on rows come beside the experts; 0: they do not.
std::int64_t beside_from(const MoeLayer& layer) {
  return tokens_behind(layer, "; beside the experts from ");
}

std::vector<PeerBuffers> filled_buffers(const std::vector<std::unique_ptr<MoeLayer>>& layers,
                                        const std::vector<std::int64_t>& tokens,
                                        std::int64_t most) {
  std::vector<PeerBuffers> buffers;
  for (std::size_t r = 0; r < layers.size(); ++r) {
    buffers.emplace_back(*layers[r], tokens[r], most);
    const Tensor& x = buffers[r].x;
    buffers[r].fill(random_tensor(x.dtype(), x.shape(), 1, 70 + r));
  }
  return buffers;
}

std::vector<Tensor> outputs_of(const std::vector<PeerBuffers>& buffers) {
  std::vector<Tensor> outputs;
  for (const PeerBuffers& own : buffers) outputs.push_back(to_host(own.output));
  return outputs;
}

struct Travelling {
  const char* scheme;
  std::int64_t hidden = kHidden;
};

class PeerFetchRowsTest : public PeerFetchTest, public ::testing::WithParamInterface<Travelling> {};

/// With room for one token more they come so. That changes no bit. Rows of 264 columns, in E4M3,
/// are no multiple of 16 bytes; of the widest three fit a multiprocessor.
TEST_P(PeerFetchRowsTest, BesideTheExpertsGiveTheBitsOfThoseThatCameBefore) {
  const auto [scheme, hidden] = GetParam();
  const PeerRanks ranks(4);
  Case spec = small_case(scheme);
  spec.hidden = hidden;
  const std::int64_t most = hidden > 1024 ? 64 : kMost;
  const LayerWeights weights = make_layer_weights({spec});
  const auto layers = ranks.make(
      weights, most, false, [](int, LayerOptions& options) { options.require = "sm90+all2all"; });
  ASSERT_FALSE(HasFailure());
  const std::int64_t from = beside_from(*layers[0]);
  ASSERT_GT(from, 1) << rows_travel(*layers[0]);
  const auto buffers = filled_buffers(layers, {from - 1, 0, from / 2, from - 1}, most);
  for (const bool fixed_sizes : {false, true}) {
    std::vector<Tensor> before;
    for (const std::int64_t room : {from - 1, from}) {
      ForwardOptions options;
      options.max_tokens = room;
      options.fixed_sizes = fixed_sizes;
      run_all(layers, buffers, options);
      wait_for_all(layers);
      const std::vector<Tensor> outputs = outputs_of(buffers);
      if (room < from) before = outputs;
      for (int r = 0; r < ranks.size(); ++r) {
        ranks.communicators[r]->check();
        EXPECT_TRUE(bitwise_equal(outputs[r], before[r])) << "rank " << r;
      }
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<Travelling>& info) {
  return info.param.scheme + std::string("_") + std::to_string(info.param.hidden);
}
INSTANTIATE_TEST_SUITE_P(Rows, PeerFetchRowsTest,
                         ::testing::ValuesIn(std::vector<Travelling>{{"bf16"},
                                                                     {"mxfp4_w4a16"},
                                                                     {"fp8_block"},
                                                                     {"fp8_channel_token"},
                                                                     {"fp8_tensor_static"},
                                                                     {"mxfp8"},
                                                                     {"mxfp4_mxfp8"},
                                                                     {"w4a8"},
                                                                     {"fp8_channel_token", 264},
                                                                     {"fp8_block", 768},
                                                                     {"fp8_block", 7168},
                                                                     {"bf16", 32768}}),
                         name_of);

TEST_F(PeerFetchTest, ReplaysOfManyRowsGiveTheOutputOfOneGpu) {
  constexpr std::int64_t kMany = 3000;
  for (const char* scheme : {"bf16", "fp8_block"}) {
    Case spec = small_case(scheme);
    spec.hidden = 1024;
    const LayerWeights weights = make_layer_weights({spec});
    const MoeLayer alone(weights, options_of(kGpu, false));
    SCOPED_TRACE(scheme);
    const PeerRanks ranks(4);
    const auto layers = ranks.make(weights, kMany, false, [](int, LayerOptions& options) {
      options.require = "sm90+all2all";
    });
    ASSERT_GT(beside_from(*layers[0]), 0) << rows_travel(*layers[0]);
    const auto buffers = filled_buffers(layers, {kMany, 2000, 0, kMany}, kMany);
    const OwnedStream stream(kGpu);
    ForwardOptions options;
    options.stream = stream;
    options.max_tokens = kMany;
    run_all(layers, buffers, options);
    synchronize(stream);
    const std::vector<Tensor> first = outputs_of(buffers);
    for (int r = 0; r < ranks.size(); ++r) {
      const Tensor expected = forward(alone, to_host(buffers[r].x), 0);
      EXPECT_LE(compare(first[r], expected).max_norm_relative, kTolerance) << "rank " << r;
    }
    const Graph graph(stream, [&] { run_all(layers, buffers, options); });
    for (int i = 0; i < 200; ++i) {
      graph.launch(stream);
      if (i % 20 != 19) continue;
      synchronize(stream);
      const std::vector<Tensor> outputs = outputs_of(buffers);
      for (int r = 0; r < ranks.size(); ++r) {
        ranks.communicators[r]->check();
        ASSERT_TRUE(bitwise_equal(outputs[r], first[r])) << "rank " << r << ", replay " << i;
      }
    }
  }
}

/// Pull gives up. Who brings rows then counts those that do not come, as the experts wait for them:
/// in the step that fails and in those behind it, replays too.
TEST_F(PeerFetchTest, RanksThatDoNotComeAreNamedAndNothingHangs) {
  const PeerRanks ranks(4, 1, kDeadline);
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const auto layers = ranks.make(
      weights, kMost, false, [](int, LayerOptions& options) { options.require = "sm90+all2all"; });
  ASSERT_GT(beside_from(*layers[0]), 0) << rows_travel(*layers[0]);
  const auto buffers = filled_buffers(layers, {kMost, kMost, 0, 77}, kMost);
  const OwnedStream stream(kGpu);
  ForwardOptions options;
  options.stream = stream;
  options.max_tokens = kMost;
  run_all(layers, buffers, options);  // loads what it needs
  const PeerBuffers& own = buffers[0];
  const Graph graph(stream, [&] { layers[0]->forward(own.x, own.output, own.scratch(), options); });
  synchronize(stream);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 3; ++i) graph.launch(stream);
  synchronize(stream);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kDeadline + std::chrono::seconds(1));
  const std::string error = error_text([&] { ranks.communicators[0]->check(); });
  EXPECT_TRUE(has(error, "rank 0 waited 2500 ms for rank")) << error;
}

}  // namespace
}  // namespace fusedmoe::testing
