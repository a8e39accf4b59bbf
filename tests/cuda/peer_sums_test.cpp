// Sums over ranks with the same tokens that go through the memory of the GPUs: the kernel alone,
// and layers, on one GPU and on all that there are.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../ranks/rank_layers.h"
#include "../unit/error_text.h"
#include "moe/peer_memory.h"
#include "peer_ranks.h"

namespace fusedmoe::testing {
namespace {

class PeerSumsTest : public CudaTest {};

/// What is added, and to what.
struct SumCase {
  DType part, output;
  std::int64_t tokens, hidden;
  bool accumulate = false;
};

Device gpu_of(int rank) {
  return Device{DeviceKind::kCuda, rank % cuda_device_count()};
}

/// Ranks that map each other's memory, with a stream each, and nothing else.
class SumRanks {
 public:
  explicit SumRanks(int size) {
    std::vector<int> names(static_cast<std::size_t>(size));
    std::iota(names.begin(), names.end(), 0);
    std::vector<std::shared_ptr<PeerBlocks>> arenas;
    for (int r = 0; r < size; ++r) {
      arenas.push_back(PeerBlocks::make({gpu_of(r), r, size, names}, PeerMemory::head_bytes()));
      streams_.emplace_back(gpu_of(r));
      placements_.push_back(Tensor::zeros({1}, DType::kI32, gpu_of(r)));
    }
    for (int r = 0; r < size; ++r) {
      for (int owner = 0; owner < size; ++owner) {
        EXPECT_TRUE(arenas[r]->map(owner, arenas[owner]->mark()));
      }
      peers_.push_back(PeerMemory::make({gpu_of(r), r, size, names}, kPatient, arenas[r],
                                        PeerMemory::head_bytes()));
    }
  }

  /// Rows of the output of every rank, which lie between columns of something else, compared with
  /// the sum in rank order, in f32, rounded to the dtype of the parts and then to that of the
  /// output. In parts, as one thread drives ranks, or by one kernel a rank.
  void expect_sum(const SumCase& c, bool in_parts) {
    constexpr std::int64_t kGap = 16;
    const int size = static_cast<int>(peers_.size());
    const Shape shape{c.tokens, c.hidden}, wide{c.tokens, c.hidden + 2 * kGap};
    const Tensor old = random_tensor(c.output, wide, 1, 3);
    std::vector<Tensor> parts, partials, outputs;
    std::vector<PeerParts> sums;
    for (int r = 0; r < size; ++r) {
      parts.push_back(random_tensor(c.part, shape, 1, 10 * ++seed_ + r));
      partials.push_back(to_device(parts.back(), gpu_of(r)));
      outputs.push_back(to_device(old, gpu_of(r)));
      sums.push_back({7, placements_[r].as<const std::uint32_t>(), partials[r],
                      outputs[r].slice(1, kGap, kGap + c.hidden), c.accumulate});
      synchronize(Stream{gpu_of(r)});
    }
    for (int r = 0; in_parts && r < size; ++r) peers_[r]->tell_parts(sums[r], streams_[r]);
    for (int r = 0; r < size; ++r) peers_[r]->add_parts(sums[r], in_parts, streams_[r]);
    const Tensor expected = sum_of(parts, old, kGap, c.accumulate);
    for (int r = 0; r < size; ++r) {
      synchronize(streams_[r]);
      ASSERT_EQ(peers_[r]->failure(), "");
      EXPECT_TRUE(bitwise_equal(to_host(outputs[r]), expected)) << "rank " << r;
    }
  }
  /// Of ranks that have one GPU.
  void share_gpu() {
    for (const auto& each : peers_) each->share_gpu(static_cast<int>(peers_.size()));
  }
  /// The same by one graph of each rank, so many times, for rows without anything between.
  void expect_replays(const SumCase& c, int replays) {
    const int size = static_cast<int>(peers_.size());
    const Shape shape{c.tokens, c.hidden};
    std::vector<Tensor> partials, outputs;
    std::vector<Graph> graphs;
    for (int r = 0; r < size; ++r) {
      partials.push_back(Tensor::zeros(shape, c.part, gpu_of(r)));
      outputs.push_back(Tensor::zeros(shape, c.output, gpu_of(r)));
      graphs.emplace_back(streams_[r], [&] { add(r, partials[r], outputs[r]); });
    }
    const Tensor old = Tensor::zeros(shape, c.output);
    for (int replay = 0; replay < replays; ++replay) {
      std::vector<Tensor> parts;
      for (int r = 0; r < size; ++r) {
        parts.push_back(random_tensor(c.part, shape, 1, 10 * ++seed_ + r));
        copy(parts[r], partials[r], streams_[r]);
        graphs[r].launch(streams_[r]);
      }
      const Tensor expected = sum_of(parts, old, 0, false);
      for (int r = 0; r < size; ++r) {
        synchronize(streams_[r]);
        ASSERT_EQ(peers_[r]->failure(), "");
        EXPECT_TRUE(bitwise_equal(to_host(outputs[r]), expected))
            << "rank " << r << ", replay " << replay;
      }
    }
  }
  /// What ranks with so many tokens each fail with.
  std::vector<std::string> errors_of(const std::vector<std::int64_t>& tokens) {
    std::vector<Tensor> rows;
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      const int rank = static_cast<int>(r);
      rows.push_back(Tensor::zeros({tokens[r], 2880}, DType::kBF16, gpu_of(rank)));
      synchronize(Stream{gpu_of(rank)});
      add(rank, rows[r], rows[r]);
    }
    std::vector<std::string> errors;
    for (std::size_t r = 0; r < tokens.size(); ++r) {
      synchronize(streams_[r]);
      errors.push_back(peers_[r]->failure());
    }
    return errors;
  }

 private:
  void add(int rank, const TensorView& partial, const TensorView& output) {
    peers_[rank]->add_parts(
        {7, placements_[rank].as<const std::uint32_t>(), partial, output, false}, false,
        streams_[rank]);
  }
  static Tensor sum_of(const std::vector<Tensor>& parts, const Tensor& old, std::int64_t gap,
                       bool accumulate) {
    const std::int64_t tokens = parts[0].size(0), hidden = parts[0].size(1);
    const DType part = parts[0].dtype(), output = old.dtype();
    Tensor result = Tensor::empty(old.shape(), output), total = Tensor::empty({1}, part);
    copy(old, result, {});
    for (std::int64_t i = 0; i < tokens * hidden; ++i) {
      float sum = 0;
      for (const Tensor& each : parts) sum += load_f32(each.data(), part, i);
      store_f32(total.data(), part, 0, sum);
      const std::int64_t at = i / hidden * (hidden + 2 * gap) + gap + i % hidden;
      const float before = accumulate ? load_f32(old.data(), output, at) : 0;
      store_f32(result.data(), output, at, load_f32(total.data(), part, 0) + before);
    }
    return result;
  }

  std::vector<std::shared_ptr<PeerMemory>> peers_;
  std::vector<OwnedStream> streams_;
  std::vector<Tensor> placements_;
  std::uint64_t seed_ = 0;
};

TEST_F(PeerSumsTest, AreThoseInRankOrder) {
  using enum DType;
  for (const int size : {2, 3, 5, 8}) {
    SumRanks ranks(size);
    for (const SumCase& c : {SumCase{kBF16, kBF16, 1, 2880}, SumCase{kBF16, kBF16, 0, 2880},
                             SumCase{kBF16, kF32, 5, 2880, true}, SumCase{kF32, kBF16, 9, 1024},
                             SumCase{kF32, kF32, 3, 100, true}, SumCase{kF16, kF16, 17, 515},
                             SumCase{kBF16, kBF16, 17, 7168, true}}) {
      for (const bool in_parts : {true, false}) {
        SCOPED_TRACE(std::to_string(size) + " ranks, " + std::to_string(c.tokens) + " x " +
                     std::to_string(c.hidden) + (in_parts ? " in parts" : ""));
        ranks.expect_sum(c, in_parts);
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

/// So many ranks add shares of few bytes already: on one GPU all their blocks run at the same time.
TEST_F(PeerSumsTest, OfManyRanksTakeTwoShots) {
  SumRanks ranks(16);
  for (const std::int64_t tokens : {60, 1, 59, 60, 3, 64, 60}) {
    SCOPED_TRACE(tokens);
    ranks.expect_sum({DType::kBF16, DType::kBF16, tokens, 1024, tokens == 59}, false);
    ASSERT_FALSE(HasFailure());
  }
}

/// 6 MiB are 1092 tokens. Two ranks that share a GPU have half of it each, so that their kernels,
/// which wait for each other, run side by side.
TEST_F(PeerSumsTest, OfManyTokensTakeSeveral) {
  for (const int size : {2, std::clamp(cuda_device_count(), 2, 8)}) {
    SumRanks ranks(size);
    if (cuda_device_count() < size) ranks.share_gpu();
    for (const std::int64_t tokens : {181, 1092, 1093, 4000, 2184}) {
      SCOPED_TRACE(std::to_string(size) + " ranks, " + std::to_string(tokens));
      for (const bool in_parts : {true, false}) {
        ranks.expect_sum({DType::kBF16, DType::kBF16, tokens, 2880, tokens == 4000}, in_parts);
      }
      ASSERT_FALSE(HasFailure());
    }
  }
}

/// In graphs, and over rows that change between replays.
TEST_F(PeerSumsTest, OfManyTokensAreReplayed) {
  SumRanks ranks(2);
  if (cuda_device_count() < 2) ranks.share_gpu();
  ranks.expect_replays({DType::kBF16, DType::kBF16, 4000, 2880}, 5);
}

/// The first launch of both has 1092 tokens.
TEST_F(PeerSumsTest, OtherTokensBehindTheFirstPieceAreNamedByBothSides) {
  SumRanks ranks(2);
  if (cuda_device_count() < 2) ranks.share_gpu();
  for (const std::string& error : ranks.errors_of({4000, 1092})) {
    EXPECT_TRUE(has(error, "4000 tokens") && has(error, "1092 tokens")) << error;
  }
}

/// A layer on ranks that have the same tokens.
struct SameTokens {
  std::string name;
  Deployment deployment;

  static std::vector<SameTokens> of(int size) {
    std::vector<SameTokens> all{{"ep", {.tp_size = size, .expert_parallel = true}}};
    if (size <= 4) all.push_back({"tp", {.tp_size = size}});
    return all;
  }
  LayerOptions options(const std::shared_ptr<Communicator>& communicator) const {
    LayerOptions options = options_of(communicator->device(), false);
    options.require += "+no_ep";
    options.ranks.communicator = communicator;
    Deployment own = deployment;
    own.rank = communicator->rank();
    options.parallel = ParallelConfig::of(own);
    return options;
  }
  std::unique_ptr<MoeLayer> make(const LayerWeights& weights,
                                 const std::shared_ptr<Communicator>& communicator) const {
    const LayerOptions made = options(communicator);
    return std::make_unique<MoeLayer>(local_weights(weights, made.parallel), made);
  }
  std::vector<std::unique_ptr<MoeLayer>> make_all(const LayerWeights& weights,
                                                  const PeerRanks& ranks) const {
    std::vector<std::unique_ptr<MoeLayer>> layers(ranks.communicators.size());
    run_ranks(ranks.size(),
              [&](int rank) { layers[rank] = make(weights, ranks.communicators[rank]); });
    return layers;
  }
};

/// One GPU for all ranks, or all GPUs; one thread drives them.
TEST_F(PeerSumsTest, LayersGiveTheBitsOfMessages) {
  for (const int size : {2, 4, 8}) {
    for (const SameTokens& how : SameTokens::of(size)) {
      for (const char* scheme : {"bf16", "mxfp4_w4a16"}) {
        SCOPED_TRACE(how.name + " " + std::to_string(size) + " " + scheme);
        Case spec = small_case(scheme);
        spec.bias = true;
        const LayerWeights weights = make_layer_weights({spec});
        const Tensor x = random_tensor(DType::kBF16, {kTokens, kHidden}, 1, 70);
        std::vector<Tensor> expected(static_cast<std::size_t>(size));
        Ranks messages({size, false});
        run_ranks(size, [&](int rank) {
          const auto layer = how.make(weights, messages.join(rank));
          EXPECT_EQ(rows_travel(*layer), "messages over threads: rank 0: peer_memory is false");
          expected[rank] = forward(*layer, x, 0);
        });
        const PeerRanks ranks(size, cuda_device_count());
        const auto layers = how.make_all(weights, ranks);
        EXPECT_EQ(rows_travel(*layers[0]), "peer memory");
        for (const std::int64_t tokens : {kTokens, std::int64_t{1}, kTokens, std::int64_t{0}}) {
          std::vector<PeerBuffers> buffers;
          for (int r = 0; r < size; ++r) {
            buffers.emplace_back(*layers[r], tokens, kTokens);
            buffers[r].fill(Tensor(x.slice(0, 0, tokens), x.owner()));
          }
          run_all(layers, buffers, {});
          wait_for_all(layers);
          for (int r = 0; r < size; ++r) {
            ranks.communicators[r]->check();
            const Tensor output = to_host(buffers[r].output);
            EXPECT_TRUE(bitwise_equal(output, to_host(buffers[0].output))) << "rank " << r;
            if (tokens != kTokens) continue;
            EXPECT_TRUE(bitwise_equal(output, expected[r])) << "rank " << r;
          }
        }
      }
    }
  }
}

/// Each rank has a graph on a stream of its own, in which one kernel tells and adds. Replays and
/// forwards outside the graph follow each other, of two layers.
TEST_F(PeerSumsTest, ReplaysGiveTheBitsOfOtherForwards) {
  constexpr int kInputs = 4, kReplays = 1000;
  const LayerWeights weights = make_layer_weights({small_case("bf16")});
  const int gpus = cuda_device_count(), size = gpus >= 4 ? 4 : 2;
  for (const std::int64_t tokens : {std::int64_t{1}, kTokens}) {
    const PeerRanks ranks(size, gpus);
    const SameTokens how{"tp", {.tp_size = size}};
    const auto first = how.make_all(weights, ranks), second = how.make_all(weights, ranks);
    std::vector<std::vector<Tensor>> inputs(kInputs), expected(kInputs), outputs;
    std::vector<PeerBuffers> buffers;
    std::vector<OwnedStream> streams;
    for (int r = 0; r < size; ++r) {
      const Device device = first[r]->config().device;
      buffers.emplace_back(*first[r], tokens, tokens);
      streams.emplace_back(device);
      outputs.emplace_back();
      for (int i = 0; i < kReplays; ++i) {
        outputs[r].push_back(Tensor::empty(buffers[r].x.shape(), DType::kBF16, device));
      }
    }
    for (int i = 0; i < kInputs; ++i) {
      const Tensor x = random_tensor(DType::kBF16, {tokens, kHidden}, 1, 8 * i);
      for (int r = 0; r < size; ++r) {
        inputs[i].push_back(to_device(x, first[r]->config().device));
        buffers[r].fill(x);
      }
      run_all(first, buffers, {});
      wait_for_all(first);
      for (int r = 0; r < size; ++r) expected[i].push_back(to_host(buffers[r].output));
    }
    const auto forward_on = [&](const MoeLayer& layer, int r) {
      ForwardOptions options;
      options.stream = streams[r];
      layer.forward(buffers[r].x, buffers[r].output, buffers[r].scratch(), options);
    };
    std::vector<Graph> graphs;
    for (int r = 0; r < size; ++r) {
      graphs.emplace_back(streams[r], [&] {
        forward_on(*second[r], r);
        forward_on(*first[r], r);
      });
    }
    for (int i = 0; i < kReplays; ++i) {
      for (int r = 0; r < size; ++r) {
        copy(inputs[i % kInputs][r], buffers[r].x, streams[r]);
        i % 50 == 49 ? forward_on(*first[r], r) : graphs[r].launch(streams[r]);
        copy(buffers[r].output, outputs[r][i], streams[r]);
      }
    }
    for (int r = 0; r < size; ++r) {
      synchronize(streams[r]);
      ranks.communicators[r]->check();
      for (int i = 0; i < kReplays; ++i) {
        ASSERT_TRUE(bitwise_equal(to_host(outputs[r][i]), expected[i % kInputs][r]))
            << tokens << " tokens, rank " << r << ", replay " << i;
      }
    }
  }
}

/// Two ranks have so many tokens each; -1: the rank does not come. What the error of both says.
void expect_error(const std::vector<std::string>& texts, std::chrono::milliseconds timeout,
                  const std::vector<std::int64_t>& tokens) {
  const PeerRanks ranks(2, cuda_device_count(), timeout);
  const SameTokens how{"ep", {.tp_size = 2, .expert_parallel = true}};
  const auto layers = how.make_all(make_layer_weights({small_case("bf16")}), ranks);
  std::vector<PeerBuffers> buffers;
  std::vector<OwnedStream> streams;
  for (int r = 0; r < 2; ++r) {
    buffers.emplace_back(*layers[r], kTokens, kTokens);
    buffers[r].fill(random_tensor(DType::kBF16, {kTokens, kHidden}, 1, 1));
    streams.emplace_back(layers[r]->config().device);
  }
  run_all(layers, buffers, {});  // loads what it needs
  wait_for_all(layers);
  for (int r = 0; r < 2; ++r) {
    if (tokens[r] < 0) continue;
    ForwardOptions options;
    options.stream = streams[r];
    layers[r]->forward(buffers[r].x.slice(0, 0, tokens[r]),
                       buffers[r].output.slice(0, 0, tokens[r]), buffers[r].scratch(), options);
  }
  for (int r = 0; r < 2; ++r) {
    synchronize(streams[r]);
    const Communicator& communicator = *ranks.communicators[r];
    const auto deadline = std::chrono::steady_clock::now() + kPatient;
    while (!communicator.peers()->has_ended() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
    for (const std::string& text : texts) {
      EXPECT_NE(communicator.status().find(text), std::string::npos) << communicator.status();
    }
    EXPECT_THROW(layers[r]->forward(buffers[r].x, buffers[r].output, buffers[r].scratch(), {}),
                 Error);
  }
}

TEST_F(PeerSumsTest, ARankThatDoesNotComeIsNamed) {
  expect_error({"rank 0 waited 400 ms for rank 1 in the sum of layer"},
               std::chrono::milliseconds(400), {5, -1});
}

TEST_F(PeerSumsTest, OtherTokensAreNamedByBothSides) {
  expect_error({"5 tokens", "6 tokens"}, kPatient, {5, 6});
}

}  // namespace
}  // namespace fusedmoe::testing
