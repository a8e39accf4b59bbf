// Random layers, valid and not: each works and agrees with the reference, or throws Error.
// run_fuzzer [--runs N] [--seconds S] [--seed S] [--verbose] [--experts NAME]: run i has seed S +
// i; a failure prints its seed and problem. With --experts all layers run on a GPU, by these
// experts. Built like the tests, also with sanitizers; clang's fuzzers cannot compile the CPU
// kernels.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "random_runs.h"
#include "testing/cases.h"
#include "testing/compare.h"

namespace {

using namespace fusedmoe;
using fusedmoe::testing::Case;
using fusedmoe::testing::expect_close;
using fusedmoe::testing::Problem;
using fusedmoe::testing::Random;
using fusedmoe::testing::Variant;

struct Statistics {
  std::int64_t compared = 0, refused = 0;
  std::set<std::string> schemes;  // of what was compared

  void count(const QuantScheme& scheme) {
    ++compared;
    schemes.insert(name(scheme));
  }
};

// ------------------------------------------------------------------------------------------------
// Problems

std::int64_t size(Random& random, bool on_gpu) {
  if (on_gpu && random.below(4) > 0) return 32 * (1 + random.below(12));  // what kernels can read
  switch (random.below(4)) {
    case 0:
      return 1 + random.below(40);
    case 1:
      return 32 * (1 + random.below(8));
    case 2:
      return 128 * (1 + random.below(2)) + random.below(3);
    default:
      return 16 * (1 + random.below(12));
  }
}

Case random_case(Random& random, bool on_gpu) {
  constexpr std::array kActivations{
      Activation::kSilu,          Activation::kGelu,       Activation::kGeluTanh,
      Activation::kSwigluOai,     Activation::kSwigluStep, Activation::kSwigluOaiUninterleave,
      Activation::kSitu,          Activation::kSiluNoMul,  Activation::kGeluNoMul,
      Activation::kGeluTanhNoMul, Activation::kRelu2NoMul};
  Case spec;
  const auto& schemes = named_schemes();
  spec.num_tokens = random.below(5) == 0 ? random.below(2) : random.below(40);
  spec.num_experts = 1 + random.below(9);
  spec.topk = 1 + random.below(std::min<std::int64_t>(spec.num_experts, 4));
  spec.hidden = size(random, on_gpu);
  spec.intermediate = size(random, on_gpu);
  spec.scheme =
      schemes[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(schemes.size())))]
          .scheme;
  spec.activation = kActivations[static_cast<std::size_t>(random.below(kActivations.size()))];
  if (spec.activation == Activation::kSitu) spec.activation_params.situ_beta = 2.0F;
  spec.bias = random.below(2) == 0;
  spec.skew = static_cast<fusedmoe::testing::RoutingSkew>(random.below(4));
  spec.negative_ids = random.below(3) == 0;
  spec.expert_map = random.below(4) == 0 && !on_gpu;
  spec.weight_on_input = random.below(5) == 0;
  if (spec.weight_on_input && random.below(4) != 0) spec.topk = 1;
  spec.gate_up_layout = static_cast<GateUpLayout>(random.below(3));
  spec.transposed = !spec.scheme.weights.quantized() && random.below(2) == 0;
  spec.seed = random.bits();
  return spec;
}

DType random_dtype(Random& random) {
  constexpr std::array kDTypes{DType::kF32, DType::kBF16, DType::kF16};
  return kDTypes[static_cast<std::size_t>(random.below(3))];
}

std::string describe(const Case& spec, DType dtype) {
  char text[400];
  std::snprintf(text, sizeof text,
                "%s %s %s tokens=%lld experts=%lld topk=%lld hidden=%lld intermediate=%lld bias=%d "
                "negative_ids=%d map=%d weight_on_input=%d",
                name(spec.scheme).c_str(), std::string(name(dtype)).c_str(),
                std::string(name(spec.activation)).c_str(), static_cast<long long>(spec.num_tokens),
                static_cast<long long>(spec.num_experts), static_cast<long long>(spec.topk),
                static_cast<long long>(spec.hidden), static_cast<long long>(spec.intermediate),
                spec.bias, spec.negative_ids, spec.expert_map, spec.weight_on_input);
  return text;
}

constexpr const char* kInfinite = "infinite";

/// One value that is not finite somewhere in the hidden states.
void poison_one(Random& random, Problem& problem) {
  const Tensor& hidden_states = problem.hidden_states;
  if (hidden_states.numel() == 0) return;
  const bool nan = random.below(2) == 0;
  hidden_states.as<float>()[random.below(hidden_states.numel())] = nan ? NAN : INFINITY;
  if (!nan) problem.spec.name = kInfinite;
}

/// One tensor of one matrix that does not fit.
void damage(Random& random, ExpertWeights& weights) {
  ExpertMatrices& expert = weights.experts[static_cast<std::size_t>(
      random.below(static_cast<std::int64_t>(weights.experts.size())))];
  WeightMatrix& matrix = random.below(2) == 0 ? expert.gate : expert.down;
  const std::array views{&matrix.values,       &matrix.scales,      &matrix.zero_points,
                         &matrix.global_scale, &matrix.input_scale, &matrix.bias};
  TensorView& view = *views[static_cast<std::size_t>(random.below(views.size()))];
  static const Tensor other = Tensor::zeros({3, 5}, DType::kF32);
  if (!view.defined() || random.below(3) == 0) {
    view = other;
  } else if (random.below(2) == 0) {
    view = TensorView();
  } else {
    view = view.slice(0, 0, view.size(0) / 2);
  }
}

// ------------------------------------------------------------------------------------------------
// Comparison

/// Relative to an element or to a typical one, outputs being of order one. Rounding in the layer's
/// dtype; and where activations are quantized, their code may be another one after a tie: by 1/16
/// of an E4M3 value, 1/127 of the largest of an int8 group, a third of an E2M1 value. Here a row
/// may consist of one element, so all of it shows.
double tolerance(const QuantScheme& scheme, DType dtype, const Selection& ran) {
  double result = dtype == DType::kF32 ? 2e-4 : 5e-2;
  if (scheme.activations) {
    const DType value = scheme.activations->value;
    result = value == DType::kE2M1 ? 1.0 : 0.15;
  }
  // Batched experts round their rows before the sum, those with hooks also what the activation
  // reads.
  return ran.config.hooks ? 4 * result : ran.prepare_finalize == &batched() ? 2 * result : result;
}

/// Experts with hooks round once more before activations are quantized: another problem. Quantized
/// infinities are large numbers, which overflow in fp32 but not in the reference's double.
bool comparable(const Case& spec, DType dtype, const Selection& ran) {
  if (spec.name == kInfinite && spec.scheme.activations) return false;
  // Fast experts subtract zero points from the sums: infinity less infinity.
  if (spec.name == kInfinite && !spec.scheme.weights.symmetric) return false;
  return !ran.config.hooks || !spec.scheme.activations || dtype == DType::kF32;
}

// ------------------------------------------------------------------------------------------------
// Runs

/// Every variant that supports the problem, expert maps and all.
void run_variants(Random& random, const Problem& problem, DType dtype, Statistics& statistics) {
  const Case& spec = problem.spec;
  const MoeConfig config = fusedmoe::testing::make_config(spec, dtype);
  const PrepareFinalizeDescriptor* transport = random.below(2) == 0 ? &no_ep() : &batched();
  const Variant reference{all_experts().back(), transport};
  if (!reference.supports(config)) return;
  const Tensor expected = fusedmoe::testing::run_variant(problem, reference, dtype);
  for (const Variant& variant : fusedmoe::testing::variants_for(config)) {
    if (variant.prepare_finalize != transport || variant.name() == reference.name()) continue;
    const Tensor actual = fusedmoe::testing::run_variant(problem, variant, dtype);
    Selection ran;
    ran.prepare_finalize = transport;
    ran.config = variant.of(config);
    if (!comparable(spec, dtype, ran)) continue;
    expect_close(actual, expected, tolerance(spec.scheme, dtype, ran), variant.name());
    statistics.count(spec.scheme);
  }
}

LayerWeights make_layer(Random& random, const Problem& problem) {
  const Case& spec = problem.spec;
  constexpr std::array kScoring{ScoringFunc::kSoftmax,      ScoringFunc::kSigmoid,
                                ScoringFunc::kSqrtSoftplus, ScoringFunc::kTopkSoftmax,
                                ScoringFunc::kTopkSigmoid,  ScoringFunc::kLogits,
                                ScoringFunc::kSparsemixer};
  LayerWeights layer;
  layer.router.num_experts = spec.num_experts;
  layer.router.topk = spec.topk + (random.below(20) == 0);
  layer.router.scoring = kScoring[static_cast<std::size_t>(random.below(kScoring.size()))];
  layer.router.renormalize = random.below(2) == 0;
  layer.router.apply_router_weight_on_input = spec.weight_on_input;
  if (layer.router.scoring != ScoringFunc::kSparsemixer && random.below(8) == 0) {
    layer.router.num_expert_group = 1 + random.below(3);
    layer.router.topk_group = 1 + random.below(2);
  }
  if (random.below(6) == 0) layer.router.num_zero_experts = 1 + random.below(4);
  const auto matrix = [&](std::int64_t rows) {
    Tensor result = Tensor::empty({rows, spec.hidden}, DType::kF32);
    for (std::int64_t i = 0; i < result.numel(); ++i) {
      result.as<float>()[i] =
          static_cast<float>(random.normal() / std::sqrt(static_cast<double>(spec.hidden)));
    }
    return result;
  };
  layer.router_weights.weight = matrix(layer.router.num_choices());
  if (random.below(6) == 0) layer.latent = {matrix(spec.hidden), matrix(spec.hidden)};
  layer.experts = problem.weights;
  if (random.below(4) == 0) damage(random, layer.experts);
  return layer;
}

/// A whole layer with any implementation, also one that does not exist, by router or given ids; or
/// with experts of a GPU, if it has a name for them, by given ids: two experts of nearly the same
/// logit may be chosen differently there.
void run_layer(Random& random, const Problem& problem, DType dtype, const std::string& gpu_experts,
               Statistics& statistics) {
  const LayerWeights weights = make_layer(random, problem);
  std::vector<std::string> names{gpu_experts, gpu_experts + "+batched"};
  if (gpu_experts.empty()) {
    names = {"",          "nonsense",         "cpu+nonsense", "cpu", "cpu+batched",
             "reference", "reference+batched"};
  }
  LayerOptions options;
  options.dtype = dtype;
  if (!gpu_experts.empty()) options.device = {DeviceKind::kCuda, 0};
  options.batch_invariant = random.below(6) == 0;
  options.hooks = random.below(6) == 0;
  options.monolithic = random.below(6) == 0;
  options.num_threads = static_cast<int>(random.below(4));
  if (random.below(4) == 0) {
    options.max_workspace_bytes = static_cast<std::size_t>(1 + random.below(1 << 20));
  }
  options.require =
      names[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(names.size())))];
  const MoeLayer layer(weights, options);
  LayerOptions plain;
  plain.dtype = dtype;
  plain.require = "reference";
  const MoeLayer reference(weights, plain);

  Tensor x = Tensor::empty(problem.hidden_states.shape(), dtype);
  convert(problem.hidden_states, x);
  const bool routed = !gpu_experts.empty() || random.below(2) == 0;
  Tensor ids = problem.topk_ids;
  if (random.below(6) == 0 && ids.numel() > 0) {
    ids.as<std::int32_t>()[0] = static_cast<std::int32_t>(random.below(1000)) - 500;
  }
  const auto forward = [&](const MoeLayer& which, std::size_t less) {
    const Device device = which.selection().config.device;
    const std::size_t bytes = which.workspace_bytes(x.size(0));
    const Tensor memory = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, device);
    const Workspace workspace{memory.data(), bytes - std::min(bytes, less)};
    const Tensor input = to_device(x, device), output = Tensor::empty(x.shape(), dtype, device);
    const Tensor own_ids = to_device(ids, device), own = to_device(problem.topk_weights, device);
    if (routed) {
      which.forward_routed(input, {own_ids, own}, output, workspace);
    } else {
      which.forward(input, output, workspace);
    }
    synchronize(Stream{device});
    return to_device(output, Device{});
  };
  const Tensor actual = forward(layer, random.below(10) == 0 ? 256 : 0);
  const Tensor expected = forward(reference, 0);
  const Selection& ran = layer.selection();
  if (!comparable(problem.spec, dtype, ran)) return;
  expect_close(actual, expected, tolerance(problem.spec.scheme, dtype, ran),
               "layer with " + ran.pair());
  statistics.count(problem.spec.scheme);
}

void run(std::uint64_t seed, const std::string& gpu_experts, Statistics& statistics,
         std::string& what) {
  Random random(seed);
  const DType dtype = random_dtype(random);
  const Case spec = random_case(random, !gpu_experts.empty());
  what = describe(spec, dtype);
  set_num_threads(static_cast<int>(1 + random.below(2)));
  try {
    Problem problem = fusedmoe::testing::make_problem(spec);
    if (random.below(8) == 0) poison_one(random, problem);
    if (gpu_experts.empty() && (spec.expert_map || random.below(2) == 0)) {
      run_variants(random, problem, dtype, statistics);
    } else {
      run_layer(random, problem, dtype, gpu_experts, statistics);
    }
  } catch (const Error& error) {
    // Not a refusal: a kernel has failed, or the library finds a fault of its own.
    if (error.kind() == ErrorKind::kDevice || error.kind() == ErrorKind::kInternal) {
      throw fusedmoe::testing::Failure{error.what()};
    }
    ++statistics.refused;
  }
}

}  // namespace

int main(int argc, char** argv) {
  Statistics statistics;
  std::string gpu_experts;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string_view(argv[i]) == "--experts") gpu_experts = argv[i + 1];
  }
  const int status = fusedmoe::testing::run_seeds(
      argc, argv,
      [&](std::uint64_t seed, std::string& what) { run(seed, gpu_experts, statistics, what); },
      [&] {
        return std::to_string(statistics.compared) + " results of " +
               std::to_string(statistics.schemes.size()) + " schemes compared, " +
               std::to_string(statistics.refused) + " problems refused";
      });
  // As where there is no GPU.
  return status == 0 && statistics.compared == 0 && !gpu_experts.empty() ? 1 : status;
}
