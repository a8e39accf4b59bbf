#include "bench/bench_problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "fusedmoe/layer.h"
#include "fusedmoe/modular_kernel.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "moe/row_flops.h"
#include "testing/compare.h"

namespace fusedmoe::cli {
namespace {

constexpr std::int64_t kDistinctExperts = 3;

/// Rows of `source` spread over all of it, to that of `target`.
void copy_sample(const TensorView& source, const TensorView& target) {
  const Stream stream{source.device().is_cpu() ? target.device() : source.device()};
  const std::int64_t rows = target.size(0);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t from = r * source.size(0) / rows;
    copy(source.slice(0, from, from + 1), target.slice(0, r, r + 1), stream);
  }
  synchronize(stream);
}

/// N(0, scale^2)
void fill_random(const TensorView& tensor, double scale, testing::Random& random) {
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    store_f32(tensor.data(), tensor.dtype(), i, static_cast<float>(scale * random.normal()));
  }
}

Workspace workspace_of(const BenchBuffers& buffers) {
  return {buffers.workspace.data(), static_cast<std::size_t>(buffers.workspace.nbytes())};
}

class ExpertsTarget final : public BenchTarget {
 public:
  ExpertsTarget(const Selection& selection, const Context& context, const ExpertWeights& weights,
                const PackProgress& progress)
      : kernel_(selection.create(context)),
        packed_(kernel_.experts().pack(weights, {.progress = progress})) {}

  std::string implementation() const override {
    return fmt::format("{}+{}", kernel_.experts().descriptor().name(),
                       kernel_.prepare_finalize().descriptor().name());
  }
  std::size_t workspace_bytes(std::int64_t num_tokens) const override {
    return kernel_.workspace_bytes(num_tokens);
  }
  void run(const BenchBuffers& buffers, Stream stream, int kernel_config) const override {
    ForwardArgs args;
    args.weights = packed_.get();
    args.output = buffers.output;
    args.hidden_states = buffers.hidden_states;
    args.topk_ids = buffers.topk_ids;
    args.topk_weights = buffers.topk_weights;
    args.kernel_config = kernel_config;
    args.stream = stream;
    kernel_.apply(args, workspace_of(buffers));
  }
  std::vector<std::string> kernel_configs(std::int64_t num_tokens) const override {
    const ProblemSize size = ProblemSize::of(kernel_.experts().config(), num_tokens);
    return kernel_.experts().kernel_configs(kernel_.sizes(size).transport.experts);
  }
  int find_kernel_config(const std::string& name) const override {
    return kernel_.experts().find_kernel_config(name);
  }

 private:
  ModularKernel kernel_;
  std::shared_ptr<const PackedWeights> packed_;
};

class LayerTarget final : public BenchTarget {
 public:
  LayerTarget(LayerWeights weights, LayerOptions options)
      : layer_(std::move(weights), std::move(options)) {}

  std::string implementation() const override {
    const Selection& selection = layer_.selection();
    return fmt::format("{}+{}", selection.experts->name(), selection.prepare_finalize->name());
  }
  std::size_t workspace_bytes(std::int64_t num_tokens) const override {
    return layer_.workspace_bytes(num_tokens);
  }
  void run(const BenchBuffers& buffers, Stream stream, int) const override {
    ForwardOptions options;
    options.topk_ids = buffers.topk_ids;
    options.topk_weights = buffers.topk_weights;
    if (!layer_.config().device.is_cpu()) options.stream = stream;
    layer_.forward(buffers.hidden_states, buffers.output, workspace_of(buffers), options);
  }

 private:
  MoeLayer layer_;
};

}  // namespace

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

MoeConfig BenchOptions::config() const {
  MoeConfig config = moe_config(model, dtype, device);
  config.scheme = scheme;
  return config;
}

testing::Case bench_case(const ModelConfig& model, const QuantScheme& scheme,
                         std::int64_t num_tokens) {
  testing::Case result;
  result.name = "bench";
  result.num_tokens = num_tokens;
  result.num_experts = model.router.num_experts;
  result.topk = model.router.topk;
  result.hidden = model.experts_hidden();
  result.intermediate = model.intermediate;
  result.scheme = scheme;
  result.activation = model.activation;
  result.activation_params = model.activation_params;
  result.bias = model.has_bias;
  result.weight_on_input = model.router.apply_router_weight_on_input;
  return result;
}

ExpertWeights bench_weights(testing::Case spec, std::int64_t num_experts) {
  spec.num_tokens = spec.topk = 1;
  spec.num_experts = std::min(num_experts, kDistinctExperts);
  ExpertWeights weights = testing::make_problem(spec).weights;
  for (std::int64_t e = kDistinctExperts; e < num_experts; ++e) {
    weights.experts.push_back(weights.experts[static_cast<std::size_t>(e % kDistinctExperts)]);
  }
  return weights;
}

Tensor random_router_weight(const RouterConfig& router, std::int64_t hidden, DType dtype,
                            testing::Random& random) {
  Tensor weight = Tensor::empty({router.num_choices(), hidden}, dtype);
  fill_random(weight, 1 / std::sqrt(static_cast<double>(hidden)), random);
  return weight;
}

BenchWork::BenchWork(const testing::Case& spec, std::int64_t weight_bytes) {
  flops = static_cast<double>(spec.num_tokens * spec.topk) *
          core::row_flops(spec.activation, spec.hidden, spec.intermediate);
  expert_bytes = static_cast<double>(weight_bytes) / static_cast<double>(spec.num_experts);
}

Tensor random_topk_weights(std::int64_t num_tokens, std::int64_t topk, testing::Random& random) {
  Tensor weights = Tensor::empty({num_tokens, topk}, DType::kF32);
  for (std::int64_t i = 0; i < weights.numel(); ++i) {
    weights.as<float>()[i] =
        static_cast<float>((0.5 + random.uniform()) / static_cast<double>(topk));
  }
  return weights;
}

RoutingDraw::RoutingDraw(std::int64_t num_experts, testing::RoutingSkew skew)
    : skew_(skew), expert_order_(static_cast<std::size_t>(num_experts)) {
  std::iota(expert_order_.begin(), expert_order_.end(), 0);
  for (std::size_t i = expert_order_.size(); i > 1; --i) {
    std::swap(expert_order_[i - 1],
              expert_order_[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(i)))]);
  }
}

std::int32_t RoutingDraw::draw_expert(bool walks) {
  const auto num_experts = static_cast<std::int64_t>(expert_order_.size());
  if (skew_ == testing::RoutingSkew::kZipf) {
    // Weight 1 / (e + 1), by inversion of the continuous law.
    const double e = std::pow(static_cast<double>(num_experts + 1), random_.uniform()) - 1;
    return std::min(static_cast<std::int32_t>(e), static_cast<std::int32_t>(num_experts - 1));
  }
  if (walks) return expert_order_[next_expert_++ % expert_order_.size()];
  return static_cast<std::int32_t>(random_.below(num_experts));
}

void RoutingDraw::draw(const TensorView& topk_ids) {
  const std::int64_t num_tokens = topk_ids.size(0), topk = topk_ids.size(1);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    std::int32_t* ids = topk_ids.as<std::int32_t>() + token * topk;
    for (std::int64_t j = 0; j < topk;) {
      ids[j] = draw_expert(num_tokens == 1);
      if (std::find(ids, ids + j, ids[j]) == ids + j) ++j;
    }
  }
}

BenchProblem::BenchProblem(BenchOptions options, const PackProgress& progress)
    : options_(std::move(options)),
      experts_(bench_weights(spec(1), options_.model.router.num_experts)),
      routing_(options_.model.router.num_experts, options_.skew) {
  target_ = make_target(options_.experts, options_.device, progress);
}

std::unique_ptr<BenchTarget> BenchProblem::make_target(const std::string& experts, Device device,
                                                       const PackProgress& progress) const {
  if (!options_.layer) {
    MoeConfig config = options_.config();
    config.device = device;
    Context context = make_context();
    if (!options_.tuned) context.tuned = nullptr;
    return std::make_unique<ExpertsTarget>(select(config, experts), context, experts_, progress);
  }
  const ModelConfig& model = options_.model;
  LayerWeights weights;
  weights.router = model.router;
  weights.experts = experts_;
  const std::int64_t num_choices = model.router.num_choices();
  testing::Random random(3);
  RouterWeights& router = weights.router_weights;
  router.weight =
      random_router_weight(model.router, model.experts_hidden(), options_.dtype, random);
  if (model.has_router_bias) router.bias = Tensor::zeros({num_choices}, DType::kF32);
  if (model.has_correction_bias) {
    router.score_correction_bias = Tensor::zeros({num_choices}, DType::kF32);
  }
  LayerOptions options;
  options.device = device;
  options.dtype = options_.dtype;
  options.require = experts;
  options.progress = progress;
  return std::make_unique<LayerTarget>(std::move(weights), std::move(options));
}

testing::Case BenchProblem::spec(std::int64_t num_tokens) const {
  return bench_case(options_.model, options_.scheme, num_tokens);
}

/// The next recorded rows, from the first again after the last.
void BenchProblem::replay(const TensorView& topk_ids, const TensorView& topk_weights) {
  const std::int64_t rows = options_.replay.topk_ids.size(0), topk = topk_ids.size(1);
  for (std::int64_t token = 0; token < topk_ids.size(0); ++token) {
    const std::int64_t row = next_row_++ % rows;
    std::copy_n(options_.replay.topk_ids.as<const std::int32_t>() + row * topk, topk,
                topk_ids.as<std::int32_t>() + token * topk);
    std::copy_n(options_.replay.topk_weights.as<const float>() + row * topk, topk,
                topk_weights.as<float>() + token * topk);
  }
}

BenchBuffers BenchProblem::make_buffers(const BenchTarget& target, Device device,
                                        const testing::Case& spec) const {
  const Tensor states = Tensor::empty({spec.num_tokens, spec.hidden}, options_.dtype);
  testing::Random random(2);
  fill_random(states, 1, random);
  const Tensor weights = random_topk_weights(spec.num_tokens, spec.topk, random);
  const auto bytes = static_cast<std::int64_t>(target.workspace_bytes(spec.num_tokens));
  BenchBuffers buffers;
  buffers.hidden_states = to_device(states, device);
  buffers.topk_weights = to_device(weights, device);
  buffers.output = Tensor::empty({spec.num_tokens, spec.hidden}, options_.dtype, device);
  buffers.topk_ids = Tensor::empty({spec.num_tokens, spec.topk}, DType::kI32, device);
  buffers.workspace = Tensor::empty({bytes}, DType::kU8, device);
  return buffers;
}

BenchBuffers BenchProblem::buffers(const testing::Case& spec) const {
  return make_buffers(*target_, options_.device, spec);
}

void BenchProblem::route(BenchBuffers& buffers) {
  const auto on_host = [](const Tensor& tensor) {
    return tensor.device().is_cpu() ? tensor : Tensor::empty(tensor.shape(), tensor.dtype());
  };
  const auto put = [](const Tensor& host, Tensor& tensor) {
    if (!tensor.device().is_cpu()) tensor = to_device(host, tensor.device());
  };
  if (options_.layer) {
    const Tensor states = on_host(buffers.hidden_states);
    fill_random(states, 1, random_);
    put(states, buffers.hidden_states);
    return;
  }
  const Tensor ids = on_host(buffers.topk_ids);
  if (options_.replay.topk_ids) {
    const Tensor weights = on_host(buffers.topk_weights);
    replay(ids, weights);
    put(weights, buffers.topk_weights);
  } else {
    routing_.draw(ids);
  }
  put(ids, buffers.topk_ids);
}

BenchBuffers BenchProblem::run_sample(const BenchTarget& target, Device device, testing::Case spec,
                                      const BenchBuffers& all) const {
  spec.num_tokens = std::min(options_.check_rows, spec.num_tokens);
  BenchBuffers sample = make_buffers(target, device, spec);
  copy_sample(all.hidden_states, sample.hidden_states);
  if (!options_.layer) {
    copy_sample(all.topk_ids, sample.topk_ids);
    copy_sample(all.topk_weights, sample.topk_weights);
  }
  const Stream stream{device};
  target.run(sample, stream);
  synchronize(stream);
  return sample;
}

Tensor BenchProblem::expected_rows(const testing::Case& spec, const BenchBuffers& timed) const {
  return run_sample(*make_target("reference", {}, {}), {}, spec, timed).output;
}

double BenchProblem::relative_error(const testing::Case& spec, const BenchBuffers& timed,
                                    const Tensor& expected) const {
  Tensor actual = Tensor::empty(expected.shape(), expected.dtype());
  if (batch_dependent(spec.scheme)) {
    actual = to_device(run_sample(*target_, options_.device, spec, timed).output, {});
  } else {
    copy_sample(timed.output, actual);
  }
  const testing::Difference difference = testing::compare(actual, expected);
  return difference.nonfinite_mismatch ? std::numeric_limits<double>::infinity()
                                       : difference.max_norm_relative;
}

}  // namespace fusedmoe::cli
