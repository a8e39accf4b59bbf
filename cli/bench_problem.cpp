#include "bench_problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
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

}  // namespace

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double error_bound(DType dtype, const QuantScheme& scheme) {
  // Sums in another order move some codes of what GEMM 2 reads by one: 1/16 of the number in E4M3.
  // The most that was seen is 2.1e-2, W4A8 of mixtral-8x7b on an H200; vLLM's tests allow 5e-2.
  if (scheme.activations) return 3e-2;
  return dtype == DType::kBF16 ? 1e-2 : dtype == DType::kF16 ? 2e-3 : 2e-5;
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

BenchBuffers::BenchBuffers(const ModularKernel& kernel, const testing::Case& spec) {
  const Device device = kernel.experts().config().device;
  const DType dtype = kernel.experts().config().dtype;
  const Tensor host_states = Tensor::empty({spec.num_tokens, spec.hidden}, dtype);
  const Tensor host_weights = Tensor::empty({spec.num_tokens, spec.topk}, DType::kF32);
  testing::Random random(2);
  for (std::int64_t i = 0; i < host_states.numel(); ++i) {
    store_f32(host_states.data(), dtype, i, static_cast<float>(random.normal()));
  }
  for (std::int64_t i = 0; i < host_weights.numel(); ++i) {
    host_weights.as<float>()[i] =
        static_cast<float>((0.5 + random.uniform()) / static_cast<double>(spec.topk));
  }
  hidden_states = to_device(host_states, device);
  topk_weights = to_device(host_weights, device);
  output = Tensor::empty({spec.num_tokens, spec.hidden}, dtype, device);
  topk_ids = Tensor::empty({spec.num_tokens, spec.topk}, DType::kI32, device);
  const std::size_t bytes = kernel.workspace_bytes(spec.num_tokens);
  workspace = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, device);
}

void BenchBuffers::run(const ModularKernel& kernel, const PackedWeights& packed, Stream stream,
                       int kernel_config) const {
  ForwardArgs args;
  args.weights = &packed;
  args.output = output;
  args.hidden_states = hidden_states;
  args.topk_ids = topk_ids;
  args.topk_weights = topk_weights;
  args.kernel_config = kernel_config;
  args.stream = stream;
  kernel.apply(args, {workspace.data(), static_cast<std::size_t>(workspace.nbytes())});
}

BenchWork::BenchWork(const testing::Case& spec, std::int64_t weight_bytes) {
  const double matrices = is_gated(spec.activation) ? 3 : 2;
  flops = 2.0 * static_cast<double>(spec.num_tokens * spec.topk) * matrices *
          static_cast<double>(spec.hidden) * static_cast<double>(spec.intermediate);
  expert_bytes = static_cast<double>(weight_bytes) / static_cast<double>(spec.num_experts);
}

BenchProblem::BenchProblem(BenchOptions options, const PackProgress& progress)
    : options_(std::move(options)) {
  const std::int64_t num_experts = options_.model.router.num_experts;
  weights_ = bench_weights(spec(1), num_experts);
  Context context = make_context();
  if (!options_.tuned) context.tuned = nullptr;
  kernel_ =
      std::make_unique<ModularKernel>(select(options_.config(), options_.experts).create(context));
  packed_ = kernel_->experts().pack(weights_, {.progress = progress});
  expert_order_.resize(static_cast<std::size_t>(num_experts));
  std::iota(expert_order_.begin(), expert_order_.end(), 0);
  for (std::size_t i = expert_order_.size(); i > 1; --i) {
    std::swap(expert_order_[i - 1],
              expert_order_[static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(i)))]);
  }
}

std::string BenchProblem::implementation() const {
  return fmt::format("{}+{}", kernel_->experts().descriptor().name(),
                     kernel_->prepare_finalize().descriptor().name());
}

testing::Case BenchProblem::spec(std::int64_t num_tokens) const {
  return bench_case(options_.model, options_.scheme, num_tokens);
}

std::int32_t BenchProblem::draw_expert(std::int64_t num_tokens) {
  const auto num_experts = static_cast<std::int64_t>(expert_order_.size());
  if (options_.skew == testing::RoutingSkew::kZipf) {
    // Weight 1 / (e + 1), by inversion of the continuous law.
    const double e = std::pow(static_cast<double>(num_experts + 1), random_.uniform()) - 1;
    return std::min(static_cast<std::int32_t>(e), static_cast<std::int32_t>(num_experts - 1));
  }
  if (num_tokens == 1) return expert_order_[next_expert_++ % expert_order_.size()];
  return static_cast<std::int32_t>(random_.below(num_experts));
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

void BenchProblem::draw(const TensorView& topk_ids) {
  const std::int64_t num_tokens = topk_ids.size(0), topk = topk_ids.size(1);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    std::int32_t* ids = topk_ids.as<std::int32_t>() + token * topk;
    for (std::int64_t j = 0; j < topk;) {
      ids[j] = draw_expert(num_tokens);
      if (std::find(ids, ids + j, ids[j]) == ids + j) ++j;
    }
  }
}

void BenchProblem::route(const TensorView& topk_ids, const TensorView& topk_weights) {
  if (options_.replay.topk_ids) {
    replay(topk_ids, topk_weights);
  } else {
    draw(topk_ids);
  }
}

BenchBuffers BenchProblem::run_sample(const ModularKernel& kernel, const PackedWeights& packed,
                                      testing::Case spec, const BenchBuffers& all) const {
  spec.num_tokens = std::min(options_.check_rows, spec.num_tokens);
  BenchBuffers sample(kernel, spec);
  copy_sample(all.hidden_states, sample.hidden_states);
  copy_sample(all.topk_ids, sample.topk_ids);
  copy_sample(all.topk_weights, sample.topk_weights);
  const Stream stream{packed.info().device};
  sample.run(kernel, packed, stream);
  synchronize(stream);
  return sample;
}

Tensor BenchProblem::expected_rows(const testing::Case& spec, const BenchBuffers& timed) const {
  const MoeConfig config = testing::make_config(spec, timed.output.dtype());
  const ModularKernel reference = select(config, "reference").create({});
  return run_sample(reference, *reference.experts().pack(weights_), spec, timed).output;
}

double BenchProblem::relative_error(const testing::Case& spec, const BenchBuffers& timed,
                                    const Tensor& expected) const {
  Tensor actual = Tensor::empty(expected.shape(), expected.dtype());
  if (batch_dependent(spec.scheme)) {
    actual = to_device(run_sample(*kernel_, *packed_, spec, timed).output, {});
  } else {
    copy_sample(timed.output, actual);
  }
  const testing::Difference difference = testing::compare(actual, expected);
  return difference.nonfinite_mismatch ? std::numeric_limits<double>::infinity()
                                       : difference.max_norm_relative;
}

}  // namespace fusedmoe::cli
