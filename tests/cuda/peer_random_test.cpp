// Random layers on ranks that share a GPU, whose rows go through its memory, against one rank. A
// test is a layer and five forwards of it, drawn from the number in its name, so that
// --gtest_filter=*/17 repeats one alone. FUSEDMOE_TEST_RUNS: how many layers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "fusedmoe/quant.h"
#include "peer_ranks.h"
#include "testing/random.h"

namespace fusedmoe::testing {
namespace {

constexpr std::int64_t kMostExperts = 20, kMostTopk = 8, kMostTokens = 200, kMostHidden = 256;

/// Every expert on a rank or two. Some ranks may have none.
ExpertPlacement random_placement(Random& random, std::int64_t num_experts, int num_ranks) {
  std::vector<std::int32_t> experts, ranks;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    std::set<std::int32_t> of_expert;
    const std::size_t copies = random.below(4) == 0 ? 2 : 1;
    while (of_expert.size() < copies) {
      of_expert.insert(static_cast<std::int32_t>(random.below(num_ranks)));
    }
    for (const std::int32_t rank : of_expert) {
      experts.push_back(static_cast<std::int32_t>(e));
      ranks.push_back(rank);
    }
  }
  return ExpertPlacement(num_experts, num_ranks, experts, ranks);
}

/// A layer that the experts serve.
struct RandomLayer {
  LayerSpec spec;
  int size = 2;
  std::int64_t most = 1;
  bool batch_invariant = false;
  LayerOptions options;  // of every rank, but for its communicator

  explicit RandomLayer(Random& random) {
    do {
      draw(random);
    } while (!is_served());
  }

  /// Rows of f16 are weighted before they are rounded.
  bool has_bits_of_one() const { return batch_invariant && options.dtype != DType::kF16; }
  std::string text() const {
    const Case& experts = spec.experts;
    const RankOptions& ranks = options.ranks;
    return std::to_string(size) + " ranks of " + std::to_string(most) + " tokens, " +
           std::to_string(experts.num_experts) + " experts, topk " + std::to_string(experts.topk) +
           ", " + std::to_string(experts.hidden) + " x " + std::to_string(experts.intermediate) +
           ", " + std::string(name(options.dtype)) + ", " + name(experts.scheme) + ", " +
           options.require + (batch_invariant ? ", batch invariant" : "") +
           (ranks.combine ? ", " + std::string(name(*ranks.combine)) : "") +
           (ranks.combine_dtype ? ", sums in f32" : "") +
           (ranks.dispatch_dtype ? ", rows quantized" : "") +
           (spec.shared_experts ? ", shared experts" : "");
  }

 private:
  void draw(Random& random) {
    const auto one_in = [&](std::int64_t n) { return random.below(n) == 0; };
    const std::vector<NamedScheme>& schemes = named_schemes();
    *this = RandomLayer();
    size = static_cast<int>(2 + random.below(7));
    most = 1 + random.below(one_in(8) ? kMostTokens : 40);
    options.dtype = one_in(4) ? DType::kF16 : DType::kBF16;
    Case& experts = spec.experts;
    experts.num_experts = 1 + random.below(kMostExperts);
    experts.topk = 1 + random.below(std::min(experts.num_experts, kMostTopk));
    experts.hidden = 32 * (1 + random.below(kMostHidden / 32));
    experts.intermediate = 32 * (1 + random.below(4));
    experts.scheme =
        one_in(4) ? schemes::unquantized(options.dtype)
                  : schemes[static_cast<std::size_t>(random.below(std::ssize(schemes)))].scheme;
    experts.bias = one_in(3);
    experts.weight_on_input = experts.topk == 1 && one_in(2);
    experts.seed = random.bits();
    spec.shared_experts = one_in(6);
    batch_invariant = one_in(2);
    options.require = experts_under_test() + (one_in(3) ? "+allgather_reducescatter" : "+all2all");
    RankOptions& ranks = options.ranks;
    ranks.placement = random_placement(random, experts.num_experts, size);
    if (one_in(4)) ranks.replica_choice = ReplicaChoice::kNearest;
    if (batch_invariant || one_in(3)) ranks.combine = CombineMode::kPerSlot;
    if (!ranks.combine && one_in(3)) ranks.combine_dtype = DType::kF32;
    if (experts.scheme.activations && one_in(2)) {
      ranks.dispatch_dtype = experts.scheme.activations->value;
    }
  }

  /// Rows of an activation scale for all of them would depend on who computes them.
  bool is_served() const {
    if (batch_dependent(spec.experts.scheme)) return false;
    MoeConfig config = make_config(spec.experts, options.dtype, kGpu);
    config.parallel = ParallelConfig::of({.dp_size = size, .expert_parallel = true});
    config.has_expert_map = true;
    config.combine = options.ranks.combine.value_or(CombineMode::kPerRank);
    config.dispatch_dtype = options.ranks.dispatch_dtype;
    config.batch_invariant = batch_invariant;
    for (const Candidate& each : explain(config).candidates) {
      const std::string pair =
          std::string(each.experts->name()) + "+" + std::string(each.prepare_finalize->name());
      if (pair == options.require) return static_cast<bool>(each.support);
    }
    return false;
  }

  RandomLayer() = default;
};

/// Ids of all kinds: some name no expert, some the same one twice.
Tensor random_ids(Random& random, const Shape& shape, std::int64_t num_experts) {
  Tensor ids = Tensor::empty(shape, DType::kI32);
  for (std::int64_t i = 0; i < ids.numel(); ++i) {
    ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(random.below(num_experts + 1) - 1);
  }
  return ids;
}

Tensor random_weights(Random& random, const Shape& shape) {
  Tensor weights = Tensor::empty(shape, DType::kF32);
  for (std::int64_t i = 0; i < weights.numel(); ++i) {
    weights.as<float>()[i] = static_cast<float>(random.uniform());
  }
  return weights;
}

class PeerRandomTest : public CudaTestWith<int> {
 public:
  static void TearDownTestSuite() { ranks_.clear(); }

 protected:
  /// Those that there are, with room for every layer, as long as they have not failed.
  static const PeerRanks& ranks_of(int size) {
    const auto found = ranks_.find(size);
    if (found != ranks_.end() && found->second->communicators[0]->status().empty()) {
      return *found->second;
    }
    const std::int64_t results = size * kMostTokens * kMostTopk * kMostHidden;
    auto made = std::make_unique<PeerRanks>(size);
    made->reserve((std::size_t{24} << 20) + static_cast<std::size_t>(results) * sizeof(float));
    return *(ranks_[size] = std::move(made));
  }

 private:
  inline static std::map<int, std::unique_ptr<PeerRanks>> ranks_;
};

TEST_P(PeerRandomTest, GivesTheOutputOfOneRank) {
  Random random(1000 + static_cast<std::uint64_t>(GetParam()));
  const RandomLayer made(random);
  SCOPED_TRACE(made.text());
  const Case& experts = made.spec.experts;
  const LayerWeights weights = make_layer_weights(made.spec);
  LayerOptions one = options_of(kGpu, made.batch_invariant);
  one.dtype = made.options.dtype;
  const MoeLayer alone(weights, one);
  const PeerRanks& ranks = ranks_of(made.size);
  const auto layers =
      ranks.make(weights, made.most, made.batch_invariant, [&](int, LayerOptions& options) {
        const RankOptions given = options.ranks;
        options.dtype = made.options.dtype;
        options.require = made.options.require;
        options.ranks = made.options.ranks;
        options.ranks.communicator = given.communicator;
        options.ranks.max_tokens_per_rank = given.max_tokens_per_rank;
      });
  ASSERT_FALSE(HasFailure());
  ASSERT_TRUE(rows_travel_by_peers(*layers[0])) << rows_travel(*layers[0]);
  for (int step = 0; step < 5; ++step) {
    ForwardOptions options;
    options.max_tokens = 1 + random.below(made.most);
    options.fixed_sizes = random.below(2) == 0;
    const bool routed = random.below(4) > 0;
    std::vector<PeerBuffers> buffers;
    for (int r = 0; r < made.size; ++r) {
      const std::int64_t tokens =
          r == step % made.size ? options.max_tokens : random.below(options.max_tokens + 1);
      buffers.emplace_back(*layers[r], tokens, made.most);
      const PeerBuffers& own = buffers[r];
      own.fill(random_tensor(made.options.dtype, own.x.shape(), 1, random.bits()));
      copy(random_ids(random, own.ids.shape(), experts.num_experts), own.ids, Stream{kGpu});
      copy(random_weights(random, own.ids.shape()), own.weights, Stream{kGpu});
    }
    run_all(layers, buffers, options, routed);
    synchronize(Stream{kGpu});
    for (int r = 0; r < made.size; ++r) {
      ranks.communicators[r]->check();
      const PeerBuffers& own = buffers[r];
      if (own.x.size(0) == 0) continue;
      const PeerBuffers expected(alone, own.x.size(0), own.x.size(0));
      if (routed) {
        alone.forward_routed(own.x, {own.ids, own.weights}, expected.output, expected.scratch());
      } else {
        alone.forward(own.x, expected.output, expected.scratch());
      }
      synchronize(Stream{kGpu});
      expect_as_one(to_host(own.output), to_host(expected.output), made.has_bits_of_one(), r);
    }
    ASSERT_FALSE(HasFailure()) << "forward " << step << (options.fixed_sizes ? ", fixed" : "")
                               << (routed ? ", ids of the caller" : "");
  }
}

int number_of_layers() {
  const char* wanted = std::getenv("FUSEDMOE_TEST_RUNS");
  return wanted ? std::atoi(wanted) : 60;
}

INSTANTIATE_TEST_SUITE_P(Layers, PeerRandomTest, ::testing::Range(0, number_of_layers()));

}  // namespace
}  // namespace fusedmoe::testing
