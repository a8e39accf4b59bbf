// ModularKernel across ranks as Selection::create() makes it, without a MoeLayer.
#include "dropping_ranks.h"
#include "fusedmoe/selection.h"

namespace fusedmoe::kernel_test {

using testing::bitwise_equal;
using testing::Dropped;
using testing::DropProblem;
using testing::errors_of_ranks;
using testing::forward_exactly;
using testing::kPatient;
using testing::make_communicators;
using testing::make_layer_weights;
using testing::run_ranks;

/// The part of a layer that a rank holds, and what runs it.
class RankKernel {
 public:
  /// As a layer of these options would choose.
  RankKernel(const LayerWeights& all, const LayerOptions& options, bool monolithic = false)
      : context_(make_context()),
        weights_(local_weights(all, parallel_of(options),
                               options.ranks.placement.value_or(ExpertPlacement::linear(
                                   all.router.num_experts, options.ranks.communicator->size())))),
        kernel_(selection(all, options, monolithic).create(context_)),
        packed_(kernel_.experts().pack(weights_.experts)) {}

  /// Arguments of a forward, but for its ids or logits.
  ForwardArgs args(const Tensor& x, const Tensor& output, std::int64_t max_tokens) const {
    ForwardArgs args;
    args.weights = packed_.get();
    args.hidden_states = x;
    args.output = output;
    args.expert_map = weights_.expert_map;
    args.max_tokens = max_tokens;
    return args;
  }

  void apply(const ForwardArgs& args) const {
    ProblemSize problem = ProblemSize::of(kernel_.experts().config(), args.hidden_states.size(0));
    problem.max_tokens = args.max_tokens;
    const std::size_t bytes = kernel_.workspace_bytes(problem);
    const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
    testing::poison(workspace);
    kernel_.apply(args, {workspace.data(), bytes});
  }

 private:
  Selection selection(const LayerWeights& all, const LayerOptions& options, bool monolithic) {
    MoeConfig config = moe_config(weights_.experts, all.router.topk, options.dtype);
    config.num_experts = all.router.num_experts;
    config.has_expert_map = true;
    config.routing_method = routing_method(all.router);
    config.parallel = parallel_of(options);
    config.combine = options.ranks.combine.value_or(CombineMode::kPerRank);
    config.monolithic = monolithic;
    context_.num_threads = 1;
    context_.ranks = options.ranks;
    return select(config, options.require);
  }

  Context context_;
  LayerWeights weights_;
  ModularKernel kernel_;
  std::shared_ptr<const PackedWeights> packed_;
};

/// A kernel's outputs have the bits of a layer's, and it drops as many rows. It adds their number
/// to what the caller's counter holds.
TEST(RankKernelTest, DropsTheRowsThatALayerDrops) {
  std::int32_t most = 0;
  for (std::uint64_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(seed);
    const DropProblem problem(3, seed);
    const LayerWeights weights = make_layer_weights({problem.spec});
    const auto comms = make_communicators(3, seed % 2 == 0, {kPatient});
    std::vector<std::int32_t> dropped(3, 100), of_layer(3, 77);
    run_ranks(3, [&](int rank) {
      const LayerOptions options = problem.options(comms[rank]);
      const Tensor& x = problem.x[rank];
      const Routing routing{problem.ids[rank], problem.factors[rank]};
      const MoeLayer layer(weights, options);
      const Tensor expected =
          forward_exactly(layer, x, problem.max_tokens, &routing, &of_layer[rank]);
      const RankKernel kernel(weights, options);
      const Tensor output = Tensor::empty(x.shape(), x.dtype());
      testing::poison(output);
      ForwardArgs args = kernel.args(x, output, problem.max_tokens);
      args.topk_ids = routing.topk_ids;
      args.topk_weights = routing.topk_weights;
      args.dropped_rows = TensorView(&dropped[rank], DType::kI32, {1});
      kernel.apply(args);
      EXPECT_TRUE(bitwise_equal(output, expected)) << "rank " << rank;
    });
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(dropped[rank], 100 + of_layer[rank]) << "rank " << rank;
      most = std::max(most, of_layer[rank]);
    }
  }
  EXPECT_GT(most, 0);
}

TEST(RankKernelTest, OptionsThatCannotBeAreRefused) {
  DropProblem problem(2, 1);
  problem.how.transport = "all2all";
  problem.how.combine = CombineMode::kPerRank;
  const LayerWeights weights = make_layer_weights({problem.spec});
  const auto comms = make_communicators(2, true, {kPatient});
  const auto errors = errors_of_ranks(2, [&](int rank) {
    LayerOptions options = problem.options(comms[rank]);
    options.ranks.receive_capacity = 0;
    const RankKernel kernel(weights, options);
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error, "ranks.drop_rows needs ranks.receive_capacity");
  }
}

/// Experts that can read them there get a rank's own rows where the caller has them.
TEST(RankKernelTest, OwnRowsAreNotCopied) {
  constexpr std::int64_t kTokens = 3, kHidden = 64;
  for (const bool lend : {true, false}) {
    const auto comms = make_communicators(2, lend, {kPatient});
    run_ranks(2, [&](int rank) {
      testing::Case spec;
      spec.num_experts = 6;
      spec.hidden = kHidden;
      const testing::RankCase how{.size = 2};
      const LayerOptions options = rank_options(how, DType::kBF16, kTokens, comms[rank]);
      LayerWeights weights = local_weights(make_layer_weights({spec}), parallel_of(options));
      MoeConfig config = moe_config(weights.experts, spec.topk, DType::kBF16);
      config.num_experts = spec.num_experts;
      config.has_expert_map = true;
      config.parallel = parallel_of(options);
      Context context = make_context();
      context.ranks = options.ranks;
      const Selection selection = select(config, "cpu+all2all");
      const auto transport = selection.prepare_finalize->create(config, context);
      const auto packed = selection.experts->create(config, context)->pack(weights.experts);
      const Tensor x = testing::random_tensor(DType::kBF16, {kTokens, kHidden}, 1, 5 + rank);
      const Tensor output = Tensor::empty(x.shape(), x.dtype());
      // Tokens 0 and 2 go to rank 0, tokens 1 and 2 to rank 1.
      const std::vector<std::int32_t> ids = {0, 1, 3, 4, 2, 5};
      const Tensor factors = testing::random_tensor(DType::kF32, {kTokens, 2}, 1, 7);
      ForwardArgs args;
      args.weights = packed.get();
      args.hidden_states = x;
      args.output = output;
      args.topk_ids = borrow(ids.data(), DType::kI32, {kTokens, 2});
      args.topk_weights = factors;
      args.max_tokens = kTokens;
      args.preparation = make_preparation(*selection.experts, config.scheme, false);
      ProblemSize problem = ProblemSize::of(config, kTokens);
      const std::size_t bytes = transport->sizes(problem, args.preparation).workspace_bytes;
      const Tensor workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
      testing::poison(workspace);
      args.prepare_workspace = workspace.data();
      transport->start_prepare(args);
      transport->finish_prepare(args);
      ASSERT_EQ(args.hidden_states.shape(), (Shape{4, kHidden}));
      ASSERT_NE(args.row_addresses, nullptr);
      for (int row = 0; row < 4; ++row) {
        const int source = row / 2, token = rank == 0 ? row % 2 * 2 : row % 2 + 1;
        const Tensor all = testing::random_tensor(DType::kBF16, x.shape(), 1, 5 + source);
        const TensorView found(args.row_addresses[row], DType::kBF16, {kHidden});
        EXPECT_TRUE(bitwise_equal(found, all.select(0, token))) << row;
        if (source == rank) {
          EXPECT_EQ(found.data(), x.select(0, token).data());
        }
      }
      comms[rank]->barrier();
    });
  }
}

/// One rank gives logits that cannot travel; the others learn so at once.
TEST(RankKernelTest, RouterLogitsAreF32) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    testing::Case spec;
    spec.num_experts = 6;
    const LayerWeights weights = make_layer_weights({spec});
    const testing::RankCase how{.size = 3, .transport = "allgather_reducescatter"};
    const auto comms = make_communicators(3, true, {kPatient});
    const auto errors = errors_of_ranks(3, [&](int rank) {
      const RankKernel kernel(weights, rank_options(how, DType::kBF16, 4, comms[rank]), true);
      const auto apply = [&](DType logits_dtype) {
        const Tensor x = testing::random_tensor(DType::kBF16, {3, spec.hidden}, 1, 5);
        const Tensor output = Tensor::empty(x.shape(), x.dtype());
        const Tensor logits = testing::random_tensor(logits_dtype, {3, spec.num_experts}, 1, 6);
        const Tensor ids = Tensor::empty({3, spec.topk}, DType::kI32);
        const Tensor factors = Tensor::empty({3, spec.topk}, DType::kF32);
        ForwardArgs args = kernel.args(x, output, 4);
        args.router = &weights.router;
        args.router_logits = logits;
        args.topk_ids = ids;
        args.topk_weights = factors;
        kernel.apply(args);
      };
      apply(DType::kF32);
      apply(rank == 1 ? dtype : DType::kF32);
    });
    const std::string error =
        "router_logits: was " + std::string(name(dtype)) + "; must be f32 across ranks";
    EXPECT_EQ(errors[1], error);
    EXPECT_EQ(errors[0], "rank 1: " + error);
    EXPECT_EQ(errors[2], errors[0]);
  }
}

}  // namespace fusedmoe::kernel_test
