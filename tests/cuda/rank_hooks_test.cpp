// Hooks of layers on several ranks on GPUs.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>

#include "../ranks/rank_hooks.h"
#include "../ranks/rank_layers.h"
#include "gpu_ranks.h"
#include "testing/compare.h"

namespace fusedmoe::testing {
namespace {

Tensor host_copy(const TensorView& view, Stream stream) {
  if (!view) return {};
  Tensor result = Tensor::empty(view.shape(), view.dtype());
  copy(view, result, stream);
  synchronize(stream);
  return result;
}

/// The same callbacks for rows on a GPU: they get copies in host memory, and the output that they
/// leave there goes back.
ExpertsHooks through_host(const ExpertsHooks& hooks) {
  const auto wrap = [](const std::function<void(const HookArgs&)>& callback) {
    return [callback](const HookArgs& args) {
      const Tensor input = host_copy(args.input, args.stream);
      const Tensor output = host_copy(args.output, args.stream);
      const Tensor offsets = host_copy(args.expert_offsets, args.stream);
      const Tensor slots = host_copy(args.permuted_to_slot, args.stream);
      const Tensor numbers = host_copy(args.origins.numbers, args.stream);
      HookArgs here = args;
      here.input = input;
      here.output = output;
      here.expert_offsets = offsets;
      here.permuted_to_slot = slots;
      here.origins.numbers = numbers;
      callback(here);
      copy(output, args.output, args.stream);
      synchronize(args.stream);
    };
  };
  return {wrap(hooks.after_gemm1), wrap(hooks.after_activation), wrap(hooks.after_gemm2)};
}

/// As tests/ranks/hooks_test.cpp on the CPU: hooks that treat every token in another way find each
/// where it is, and the rows that the experts get are those tokens.
void expect_hooks_as_one(const Setting& setting, const char* scheme, const char* transport,
                         CombineMode combine, bool fixed_sizes) {
  SCOPED_TRACE(setting.name() + " " + scheme + " " + transport + " " + std::string(name(combine)) +
               (fixed_sizes ? " fixed" : ""));
  const LayerWeights weights = make_layer_weights({small_case(scheme)});
  const ExpertPlacement placement = ExpertPlacement::round_robin(13, setting.size);
  const std::vector<std::int32_t> all = ExpertPlacement::linear(13, 1).local_experts(0);
  const auto hidden_states_of = [](int rank) {
    return random_tensor(DType::kBF16, {tokens_of(rank), kHidden}, 1, 170 + rank);
  };
  Ranks ranks(setting);
  run_ranks(setting.size, [&](int rank) {
    const auto communicator = ranks.join(rank);
    LayerOptions options = options_of(communicator->device(), false);
    options.hooks = true;
    const MoeLayer alone(weights, options);
    options.require += std::string("+") + transport;
    options.ranks.communicator = communicator;
    options.ranks.placement = placement;
    options.ranks.max_tokens_per_rank = kTokens;
    options.ranks.combine = combine;
    const MoeLayer layer(weights, options);

    const Tensor x = hidden_states_of(rank);
    std::atomic<int> rows{0}, rows_alone{0}, rows_compared{0};
    const auto here = [&](const HookArgs& args, std::int64_t row) {
      EXPECT_FALSE(args.origins.numbers);
      return RowOrigin{rank, args.permuted_to_slot.as<const std::int32_t>()[row] / args.topk};
    };
    const ExpertsHooks alone_hooks = through_host(adapters(here, all, 1, rows_alone));
    const Tensor expected = forward(alone, x, 0, &alone_hooks);
    EXPECT_EQ(rows_alone, 3 * 4 * x.size(0)) << "rank " << rank;
    if (x.size(0) > 0) {
      const Tensor plain = forward(alone, x, 0);
      EXPECT_GT(compare(plain, expected).max_norm_relative, 0.1) << "hooks without effect";
    }

    ExpertsHooks hooks = adapters(origin_of, placement.local_experts(rank), 1, rows);
    const auto scale = hooks.after_gemm1;
    hooks.after_gemm1 = [&](const HookArgs& args) {
      for (std::int64_t row = 0; args.input && row < args.permuted_to_slot.numel(); ++row) {
        const std::int32_t slot = args.permuted_to_slot.as<const std::int32_t>()[row];
        if (slot < 0) continue;
        const RowOrigin origin = origin_of(args, row);
        EXPECT_TRUE(bitwise_equal(args.input.select(0, slot / args.topk),
                                  hidden_states_of(origin.rank).select(0, origin.token)));
        ++rows_compared;
      }
      scale(args);
    };
    hooks = through_host(hooks);
    for (int step = 0; step < 2; ++step) {
      const Tensor output = forward(layer, x, kTokens, &hooks, fixed_sizes);
      EXPECT_LE(compare(output, expected).max_norm_relative, kTolerance) << "rank " << rank;
    }
    EXPECT_GT(rows, 0) << "rank " << rank;
    EXPECT_EQ(3 * rows_compared, rows) << "rank " << rank;
    communicator->barrier();
  });
}

TEST(CudaRanksTest, HooksKnowTheTokenOfEveryRow) {
  FUSEDMOE_SKIP_WITHOUT_GPU();
  for (const Setting& setting : settings()) {
    for (const char* transport : {"all2all", "allgather_reducescatter"}) {
      for (const char* scheme : {"bf16", "fp8_block"}) {
        expect_hooks_as_one(setting, scheme, transport, CombineMode::kPerRank, false);
        expect_hooks_as_one(setting, scheme, transport, CombineMode::kPerSlot, false);
      }
      expect_hooks_as_one(setting, "bf16", transport, CombineMode::kPerRank, true);
    }
  }
}

}  // namespace
}  // namespace fusedmoe::testing
