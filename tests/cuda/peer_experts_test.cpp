// Experts of an engine's own between the halves of a transport whose rows go through peer memory.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "fusedmoe/modular_kernel.h"
#include "peer_ranks.h"

namespace fusedmoe::testing {
namespace {

class PeerExpertsTest : public CudaTest {};

/// Other experts by another name, which write what they compute to one place.
class ToOnePlace final : public ExpertsDescriptor {
 public:
  explicit ToOnePlace(const ExpertsDescriptor& others) : others_(others) {}
  std::string_view name() const override { return "to one place"; }
  Support supports(const MoeConfig& config) const override { return others_.supports(config); }
  std::string_view instruction_set() const override { return others_.instruction_set(); }
  int layout_version() const override { return others_.layout_version(); }
  bool expects_unquantized_inputs(const QuantScheme& scheme) const override {
    return others_.expects_unquantized_inputs(scheme);
  }
  bool takes_quantized_inputs(const QuantScheme& scheme) const override {
    return others_.takes_quantized_inputs(scheme);
  }
  std::shared_ptr<const Experts> create(const MoeConfig&, const Context&) const override {
    return nullptr;
  }

 private:
  const ExpertsDescriptor& others_;
};

class ExpertsToOnePlace final : public Experts {
 public:
  ExpertsToOnePlace(const ToOnePlace& descriptor, std::shared_ptr<const Experts> others)
      : Experts(descriptor, others->config(), others->context()), others_(std::move(others)) {}
  WorkspaceSizes workspace_sizes(const ProblemSize& problem) const override {
    return others_->workspace_sizes(problem);
  }
  std::shared_ptr<PackedWeights> pack(const ExpertWeights& weights,
                                      const PackOptions& options) const override {
    return others_->pack(weights, options);
  }
  bool accepts(const PackedWeights& weights) const override { return others_->accepts(weights); }

 private:
  void run(const ForwardArgs& args) const override {
    EXPECT_EQ(args.row_targets, nullptr);
    others_->apply(args);
  }
  std::shared_ptr<const Experts> others_;
};

/// A rank's kernel, with the experts of the library as they are, or as an engine's own.
class RankKernel {
 public:
  RankKernel(const LayerWeights& all, const LayerOptions& options, bool own) {
    const LayerWeights weights = local_weights(all, parallel_of(options));
    MoeConfig config = moe_config(weights.experts, all.router.topk, DType::kBF16);
    config.num_experts = all.router.num_experts;
    config.has_expert_map = true;
    config.routing_method = routing_method(all.router);
    config.parallel = parallel_of(options);
    config.device = options.device;
    config.combine = options.batch_invariant ? CombineMode::kPerSlot : CombineMode::kPerRank;
    config.batch_invariant = options.batch_invariant;
    Context context = make_context();
    context.ranks = options.ranks;
    const Selection selection = select(config, options.require);
    std::shared_ptr<const Experts> experts = selection.experts->create(config, context);
    packed_ = experts->pack(weights.experts);
    expert_map_ = to_device(weights.expert_map, config.device);
    if (own) {
      descriptor_ = std::make_unique<ToOnePlace>(*selection.experts);
      experts = std::make_shared<ExpertsToOnePlace>(*descriptor_, std::move(experts));
    }
    kernel_.emplace(selection.prepare_finalize->create(config, context), std::move(experts));
  }

  std::size_t workspace_bytes(std::int64_t tokens, bool fixed_sizes) const {
    ProblemSize problem = ProblemSize::of(kernel_->experts().config(), tokens);
    problem.max_tokens = kTokens;
    problem.fixed_sizes = fixed_sizes;
    return kernel_->workspace_bytes(problem);
  }
  ModularKernel::Step begin(const Tensor& x, const Routing& routing, const Tensor& output,
                            Workspace workspace, bool fixed_sizes) const {
    ForwardArgs args;
    args.weights = packed_.get();
    args.hidden_states = x;
    args.topk_ids = routing.topk_ids;
    args.topk_weights = routing.topk_weights;
    args.expert_map = expert_map_;
    args.output = output;
    args.max_tokens = kTokens;
    args.fixed_sizes = fixed_sizes;
    args.num_experts = kernel_->experts().config().num_experts;
    args.stream = Stream{x.device()};
    return kernel_->begin(args, workspace);
  }

 private:
  std::unique_ptr<ToOnePlace> descriptor_;
  std::shared_ptr<const PackedWeights> packed_;
  Tensor expert_map_;
  std::optional<ModularKernel> kernel_;
};

/// What they leave is sent to where it is added. So the output has the same bits.
TEST_F(PeerExpertsTest, MayLeaveWhatTheyComputeInOnePlace) {
  constexpr int kSize = 2;
  const PeerRanks ranks(kSize, gpu_counts().back());
  ranks.reserve(std::size_t{32} << 20);
  for (const char* scheme : {"bf16", "fp8_block"}) {
    const LayerWeights weights = make_layer_weights({small_case(scheme)});
    for (const bool batch_invariant : {false, true}) {
      const auto outputs = [&](bool own, bool fixed_sizes, std::uint64_t seed) {
        std::vector<std::unique_ptr<RankKernel>> kernels(kSize);
        run_ranks(kSize, [&](int rank) {
          LayerOptions options = options_of(ranks.communicators[rank]->device(), batch_invariant);
          options.require += "+all2all";
          options.ranks.communicator = ranks.communicators[rank];
          options.ranks.max_tokens_per_rank = kTokens;
          kernels[rank] = std::make_unique<RankKernel>(weights, options, own);
        });
        std::vector<Tensor> kept, outputs;
        std::vector<ModularKernel::Step> steps;
        for (int rank = 0; rank < kSize; ++rank) {
          const Device device = ranks.communicators[rank]->device();
          const std::int64_t tokens = kTokens - 5 * rank;
          const auto there = [&](const Tensor& tensor) {
            return kept.emplace_back(to_device(tensor, device));
          };
          const Tensor x = there(random_tensor(DType::kBF16, {tokens, kHidden}, 1, seed + rank));
          const Tensor ids = Tensor::empty({tokens, 4}, DType::kI32);
          for (std::int64_t i = 0; i < ids.numel(); ++i) {
            ids.as<std::int32_t>()[i] = static_cast<std::int32_t>((i * 5 + rank) % 13);
          }
          const Tensor ids_there = there(ids);
          const Tensor factors = there(random_tensor(DType::kF32, ids.shape(), 1, 9 + rank));
          const auto bytes = kernels[rank]->workspace_bytes(tokens, fixed_sizes);
          const Tensor workspace = kept.emplace_back(
              Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, device));
          const Tensor output =
              outputs.emplace_back(Tensor::empty(x.shape(), DType::kBF16, device));
          for (const Tensor& each : {workspace, output}) fill_bytes(each, 0xff, Stream{device});
          steps.push_back(kernels[rank]->begin(x, {ids_there, factors}, output,
                                               {workspace.data(), bytes}, fixed_sizes));
        }
        for (ModularKernel::Step& step : steps) step.compute();
        for (ModularKernel::Step& step : steps) step.finish();
        for (Tensor& output : outputs) {
          synchronize(Stream{output.device()});
          output = to_host(output);
        }
        return outputs;
      };
      for (const bool fixed_sizes : {false, true}) {
        SCOPED_TRACE(std::string(scheme) + (batch_invariant ? " per slot" : " per rank") +
                     (fixed_sizes ? ", fixed" : ", exact"));
        const std::vector<Tensor> expected = outputs(false, fixed_sizes, 7);
        outputs(false, fixed_sizes, 70);  // else what the first left still lies there
        const std::vector<Tensor> found = outputs(true, fixed_sizes, 7);
        for (int rank = 0; rank < kSize; ++rank) {
          ranks.communicators[rank]->check();
          EXPECT_TRUE(bitwise_equal(found[rank], expected[rank])) << "rank " << rank;
          EXPECT_EQ(testing::compare(found[rank], expected[rank]).max_norm_relative, 0) << "NaN";
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::testing
