// The stages around the grouped GEMMs, at the sizes of published models: router logits, top-k, and
// the permutation. Together they should stay a small part of the layer (`fusedmoe bench`).
#include <benchmark/benchmark.h>

#include "fusedmoe/router.h"
#include "testing/cases.h"

namespace {

using namespace fusedmoe;

/// args: tokens, experts, topk, hidden.
struct Sizes {
  std::int64_t tokens, experts, topk, hidden;
  explicit Sizes(const benchmark::State& state)
      : tokens(state.range(0)),
        experts(state.range(1)),
        topk(state.range(2)),
        hidden(state.range(3)) {}
};

Tensor random_f32(Shape shape, std::uint64_t seed) {
  Tensor result = Tensor::empty(shape, DType::kF32);
  testing::Random random(seed);
  for (std::int64_t i = 0; i < result.numel(); ++i) {
    result.as<float>()[i] = static_cast<float>(random.normal());
  }
  return result;
}

void BM_RouterLogits(benchmark::State& state) {
  const Sizes sizes(state);
  RouterWeights weights;
  weights.weight = random_f32({sizes.experts, sizes.hidden}, 1);
  const Tensor x = random_f32({sizes.tokens, sizes.hidden}, 2);
  const Tensor logits = Tensor::empty({sizes.tokens, sizes.experts}, DType::kF32);
  for (auto _ : state) router_logits(weights, x, logits);
  state.counters["FLOP/s"] =
      benchmark::Counter(2.0 * static_cast<double>(sizes.tokens * sizes.experts * sizes.hidden),
                         benchmark::Counter::kIsIterationInvariantRate);
}

Routing make_routing(const Sizes& sizes, Tensor& ids, Tensor& weights) {
  ids = Tensor::empty({sizes.tokens, sizes.topk}, DType::kI32);
  weights = Tensor::empty({sizes.tokens, sizes.topk}, DType::kF32);
  return {ids, weights};
}

void BM_Route(benchmark::State& state) {
  const Sizes sizes(state);
  const Tensor logits = random_f32({sizes.tokens, sizes.experts}, 1);
  RouterConfig config;
  config.num_experts = sizes.experts;
  config.topk = sizes.topk;
  config.renormalize = true;
  Tensor ids, weights;
  const Routing routing = make_routing(sizes, ids, weights);
  for (auto _ : state) route(config, logits, {}, routing);
}

void BM_BuildRoutingData(benchmark::State& state) {
  const Sizes sizes(state);
  Tensor ids, weights;
  const Routing routing = make_routing(sizes, ids, weights);
  RouterConfig config;
  config.num_experts = sizes.experts;
  config.topk = sizes.topk;
  route(config, random_f32({sizes.tokens, sizes.experts}, 1), {}, routing);
  const std::size_t bytes = routing_data_bytes(sizes.tokens, sizes.topk, sizes.experts);
  const Tensor memory = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  for (auto _ : state) {
    build_routing_data(routing.topk_ids, {}, sizes.experts, memory.data(), bytes);
  }
}

void model_sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"tokens", "experts", "topk", "hidden"})->UseRealTime();
  for (std::int64_t tokens : {1, 32, 512}) {
    bench->Args({tokens, 32, 4, 2880});   // gpt-oss-20b
    bench->Args({tokens, 128, 8, 2048});  // qwen3-30b-a3b
    bench->Args({tokens, 256, 8, 7168});  // deepseek-v3
  }
}

BENCHMARK(BM_RouterLogits)->Apply(model_sizes);
BENCHMARK(BM_Route)->Apply(model_sizes);
BENCHMARK(BM_BuildRoutingData)->Apply(model_sizes);

}  // namespace

BENCHMARK_MAIN();
