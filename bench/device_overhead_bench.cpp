// What one eager forward on CUDA costs the host: the time until the call returns, with nothing to
// wait for. One token on a layer of gpt-oss-20b's sizes with few experts. The project's bar: 15 us.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>

#include "fusedmoe/layer.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/selection.h"
#include "testing/cases.h"

namespace {

using namespace fusedmoe;

const Device kGpu{DeviceKind::kCuda, 0};
constexpr std::int64_t kExperts = 4;
constexpr int kBurst = 16;  // forwards between waits: fewer launches than a stream's queue holds
constexpr int kForwards = 64 * kBurst;
constexpr int kRepetitions = 15;  // of which the median counts: the host does other things too

/// Four experts with the same weights. Made once: the function of a benchmark runs several times.
const ExpertWeights& gpt_oss_20b(bool mxfp4) {
  const auto make = [](const QuantScheme& scheme) {
    testing::Case spec;
    spec.num_tokens = spec.num_experts = spec.topk = 1;
    spec.hidden = spec.intermediate = 2880;
    spec.scheme = scheme;
    spec.activation = Activation::kSwigluOai;
    spec.bias = true;
    ExpertWeights weights = testing::make_problem(spec).weights;
    weights.experts.resize(kExperts, weights.experts.front());
    return weights;
  };
  static const ExpertWeights bf16 = make(schemes::unquantized(DType::kBF16));
  static const ExpertWeights codes = make(schemes::mxfp4_w4a16());
  return mxfp4 ? codes : bf16;
}

/// Times bursts of `enqueue`; one iteration is one call.
template <typename Enqueue>
void measure(benchmark::State& state, Stream stream, const Enqueue& enqueue) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < kBurst; ++i) enqueue();
  while (state.KeepRunningBatch(kBurst)) {
    synchronize(stream);
    const auto start = Clock::now();
    for (int i = 0; i < kBurst; ++i) enqueue();
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    state.SetIterationTime(elapsed.count());
  }
  synchronize(stream);
}

bool usable(benchmark::State& state) {
  const std::string problem = device_problem(kGpu);
  if (!problem.empty()) state.SkipWithError(problem.c_str());
  return problem.empty();
}

Tensor device_bytes(std::size_t bytes) {
  return Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, kGpu);
}

/// From top-k ids to the output; and the launch of a graph of it, to compare.
void BM_ModularKernelApply(benchmark::State& state) {
  if (!usable(state)) return;
  const bool mxfp4 = state.range(0) != 0, replay = state.range(1) != 0;
  const ExpertWeights& weights = gpt_oss_20b(mxfp4);
  const Selection selection = select(moe_config(weights, kExperts, DType::kBF16, kGpu));
  const ModularKernel kernel = selection.create(make_context());
  const auto packed = kernel.experts().pack(weights);
  const Tensor x = Tensor::zeros({1, weights.hidden}, DType::kBF16, kGpu);
  const Tensor host_ids = Tensor::empty({1, kExperts}, DType::kI32);
  std::iota(host_ids.as<std::int32_t>(), host_ids.as<std::int32_t>() + kExperts, 0);
  const Tensor ids = to_device(host_ids, kGpu);
  const Tensor topk_weights = Tensor::zeros({1, kExperts}, DType::kF32, kGpu);
  const Tensor output = Tensor::empty(x.shape(), DType::kBF16, kGpu);
  const std::size_t bytes = kernel.workspace_bytes(1);
  const Tensor workspace = device_bytes(bytes);
  const OwnedStream stream(kGpu);
  ForwardArgs args;
  args.weights = packed.get();
  args.output = output;
  args.hidden_states = x;
  args.topk_ids = ids;
  args.topk_weights = topk_weights;
  args.stream = stream;
  const auto eager = [&] { kernel.apply(args, {workspace.data(), bytes}); };
  state.SetLabel(std::string(selection.experts->name()));
  if (!replay) return measure(state, stream, eager);
  const Graph graph(stream, eager);
  measure(state, stream, [&] { graph.launch(stream); });
}

/// The whole layer, router included.
void BM_MoeLayerForward(benchmark::State& state) {
  if (!usable(state)) return;
  LayerWeights weights;
  weights.experts = gpt_oss_20b(state.range(0) != 0);
  const std::int64_t hidden = weights.experts.hidden;
  weights.router.num_experts = weights.router.topk = kExperts;
  weights.router.scoring = ScoringFunc::kTopkSoftmax;
  weights.router_weights.weight = Tensor::zeros({kExperts, hidden}, DType::kBF16);
  LayerOptions options;
  options.device = kGpu;
  const MoeLayer layer(std::move(weights), options);
  const Tensor x = Tensor::zeros({1, hidden}, DType::kBF16, kGpu);
  const Tensor output = Tensor::empty(x.shape(), DType::kBF16, kGpu);
  const std::size_t bytes = layer.workspace_bytes(1);
  const Tensor workspace = device_bytes(bytes);
  const OwnedStream stream(kGpu);
  state.SetLabel(layer.plan_line());
  measure(state, stream, [&] {
    layer.forward(x, output, {workspace.data(), bytes}, {.stream = stream});
  });
}

// Iterations are fixed because benchmark would go on for half a second of host time, which the GPU
// takes half a minute for.
void settings(benchmark::internal::Benchmark* benchmark) {
  benchmark->UseManualTime()
      ->Iterations(kForwards)
      ->Repetitions(kRepetitions)
      ->ReportAggregatesOnly()
      ->Unit(benchmark::kMicrosecond);
}

BENCHMARK(BM_ModularKernelApply)
    ->ArgNames({"mxfp4", "graph"})
    ->ArgsProduct({{0, 1}, {0, 1}})
    ->Apply(settings);
BENCHMARK(BM_MoeLayerForward)->ArgName("mxfp4")->Arg(0)->Arg(1)->Apply(settings);

}  // namespace

BENCHMARK_MAIN();
