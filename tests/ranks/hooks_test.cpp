// Hooks across ranks: callbacks learn which token of which rank a row is, and do the same with it
// as on one rank.
#include <atomic>

#include "fusedmoe/quant.h"
#include "rank_hooks.h"
#include "rank_layers.h"

namespace fusedmoe::hooks_test {

using testing::adapters;
using testing::bitwise_equal;
using testing::Case;
using testing::compare;
using testing::kPatient;
using testing::make_communicators;
using testing::make_layer_weights;
using testing::one_rank_options;
using testing::origin_of;
using testing::random_tensor;
using testing::rank_options;
using testing::RankCase;
using testing::RowOrigin;
using testing::run_ranks;

constexpr std::int64_t kMost = 6, kHidden = 128;

/// Rank 1 has none.
std::int64_t tokens_of(int group) {
  return group == 1 ? 0 : kMost - group;
}
Tensor hidden_states_of(int group) {
  return random_tensor(DType::kBF16, {tokens_of(group), kHidden}, 1, 300 + group);
}

Tensor forward(const MoeLayer& layer, const Tensor& x, const ExpertsHooks& hooks, std::int64_t most,
               bool fixed_sizes = false) {
  const testing::Scratch scratch(layer, std::max(most, x.size(0)), fixed_sizes);
  Tensor output = Tensor::empty(x.shape(), x.dtype());
  testing::poison(output);
  ForwardOptions options;
  options.hooks = &hooks;
  options.max_tokens = most;
  options.fixed_sizes = fixed_sizes;
  layer.forward(x, output, scratch.workspace, options);
  return output;
}

/// With batch_invariant the bits are those of one rank.
void expect_as_one_rank(RankCase how, const char* scheme, const Deployment& deployment) {
  SCOPED_TRACE(std::string(how.transport) + " " + scheme + " " + how.experts);
  Case spec;
  spec.num_experts = 7;
  spec.topk = 3;
  spec.hidden = spec.intermediate = kHidden;
  spec.scheme = parse_scheme(scheme);
  const LayerWeights weights = make_layer_weights({spec});
  how.deployment = deployment;
  how.size = deployment.tp_size * deployment.dp_size;
  how.placement = ExpertPlacement::round_robin(7, how.size);
  const auto comms = make_communicators(how.size, how.lend, {kPatient}, how.cut);
  std::vector<std::int32_t> all(7);
  for (int e = 0; e < 7; ++e) all[e] = e;
  run_ranks(how.size, [&](int rank) {
    LayerOptions options = one_rank_options(how, DType::kBF16);
    options.hooks = true;
    const MoeLayer alone(weights, options);
    options = rank_options(how, DType::kBF16, kMost, comms[rank]);
    options.hooks = true;
    const MoeLayer layer(weights, options);
    const int group = rank / deployment.tp_size;
    const Tensor x = hidden_states_of(group);
    std::atomic<int> rows{0}, rows_alone{0};
    const auto here = [&](const HookArgs& args, std::int64_t row) {
      EXPECT_FALSE(args.origins.numbers);
      return RowOrigin{group * deployment.tp_size,
                       args.permuted_to_slot.as<const std::int32_t>()[row] / args.topk};
    };
    const Tensor expected =
        forward(alone, x, adapters(here, all, deployment.tp_size, rows_alone), 0);
    ExpertsHooks hooks =
        adapters(origin_of, how.placement->local_experts(rank), deployment.tp_size, rows);
    const auto scale = hooks.after_gemm1;
    hooks.after_gemm1 = [&](const HookArgs& args) {
      for (std::int64_t row = 0; args.input && row < args.permuted_to_slot.numel(); ++row) {
        const RowOrigin origin = origin_of(args, row);
        const std::int64_t slot = args.permuted_to_slot.as<const std::int32_t>()[row];
        EXPECT_TRUE(bitwise_equal(
            args.input.select(0, slot / args.topk),
            hidden_states_of(origin.rank / deployment.tp_size).select(0, origin.token)));
      }
      scale(args);
    };
    for (int step = 0; step < 2; ++step) {
      const Tensor output = forward(layer, x, hooks, kMost, how.fixed_sizes);
      if (how.batch_invariant) {
        EXPECT_TRUE(bitwise_equal(output, expected)) << "rank " << rank;
      } else {
        // Sums of bf16 parts, as without hooks.
        EXPECT_LE(compare(output, expected).max_norm_relative, 2e-2) << "rank " << rank;
      }
    }
    EXPECT_GT(rows, 0);
    EXPECT_EQ(rows_alone > 0, x.size(0) > 0);
  });
}

TEST(RankHooksTest, TheyKnowTheTokenOfEveryRow) {
  for (const testing::Way& way : testing::kWays) {
    RankCase how{.transport = way.transport, .lend = way.lend};
    const Deployment three{.dp_size = 3, .expert_parallel = true};
    for (const char* scheme : {"bf16", "fp8_block"}) {
      for (const char* experts : {"cpu", "reference"}) {
        how.experts = experts;
        expect_as_one_rank(how, scheme, three);
      }
      how.experts = "cpu";
      how.batch_invariant = true;
      expect_as_one_rank(how, scheme, three);
      how.batch_invariant = false;
    }
    how.fixed_sizes = true;
    expect_as_one_rank(how, "bf16", three);
    how.fixed_sizes = false;
    how.cut = !way.lend;
    expect_as_one_rank(how, "bf16", three);
    expect_as_one_rank(how, "bf16", {.tp_size = 2, .dp_size = 2, .expert_parallel = true});
  }
}

TEST(RankHooksTest, ALayerWithHooksOnOneRankIsNoneOnAll) {
  const auto comms = make_communicators(2, true, {kPatient});
  const auto errors = testing::errors_of_ranks(2, [&](int rank) {
    LayerOptions options = rank_options({}, DType::kBF16, kMost, comms[rank]);
    options.hooks = rank == 1;
    const MoeLayer layer(make_layer_weights({}), options);
  });
  EXPECT_EQ(errors[0], "the ranks of a layer differ in hooks: rank 0 has false, rank 1 has true");
  EXPECT_EQ(errors[1], errors[0]);
}

}  // namespace fusedmoe::hooks_test
