// Two LoRA adapters on the experts of a published checkpoint; every third token uses none of them.
// Usage: lora CHECKPOINT INPUT.safetensors
#include "lora.h"

#include <fusedmoe/checkpoint.h>
#include <fusedmoe/layer.h>
#include <fusedmoe/safetensors.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>

namespace {

std::vector<float> random_values(std::int64_t count, float deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

lora::Adapter random_adapter(const fusedmoe::MoeConfig& config, std::int64_t rank,
                             std::mt19937& random) {
  const std::int64_t experts = config.num_local_experts;
  const float deviation = 1 / std::sqrt(static_cast<float>(config.hidden));
  const std::int64_t width = (fusedmoe::is_gated(config.activation) ? 2 : 1) * config.intermediate;
  return {rank, random_values(experts * rank * config.hidden, deviation, random),
          random_values(experts * width * rank, 0.1f, random),
          random_values(experts * rank * config.intermediate, deviation, random),
          random_values(experts * config.hidden * rank, 0.1f, random)};
}

}  // namespace

int main(int argc, char** argv) try {
  using namespace fusedmoe;
  if (argc != 3) throw Error("arguments", "not two", "CHECKPOINT INPUT.safetensors");

  const Checkpoint checkpoint = Checkpoint::open(argv[1]);
  LayerOptions options;
  options.hooks = true;  // chooses experts that have injection points
  const MoeLayer layer(checkpoint.load_layer(checkpoint.moe_layers().front()), options);
  std::puts(layer.plan_line().c_str());

  const Tensor x = SafetensorsFile::open(argv[2]).tensor("hidden_states");  // (tokens, hidden) bf16
  const std::int64_t num_tokens = x.size(0), hidden = x.size(1);
  std::vector<int> adapter_of_token;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    adapter_of_token.push_back(static_cast<int>(t % 3) - 1);
  }
  std::mt19937 random(7);
  lora::ExpertsLora experts_lora(
      {random_adapter(layer.config(), 8, random), random_adapter(layer.config(), 4, random)});
  experts_lora.select(adapter_of_token);
  const ExpertsHooks hooks = experts_lora.hooks();

  const std::size_t bytes = layer.workspace_bytes(num_tokens);
  const Tensor scratch = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  const Tensor base = Tensor::empty(x.shape(), DType::kBF16);
  const Tensor adapted = Tensor::empty(x.shape(), DType::kBF16);
  layer.forward(x, base, {scratch.data(), bytes});
  layer.forward(x, adapted, {scratch.data(), bytes}, {.hooks = &hooks});

  for (int adapter = -1; adapter < 2; ++adapter) {
    float largest = 0;
    for (std::int64_t i = 0; i < num_tokens * hidden; ++i) {
      if (adapter_of_token[static_cast<std::size_t>(i / hidden)] != adapter) continue;
      const float change =
          load_f32(adapted.data(), DType::kBF16, i) - load_f32(base.data(), DType::kBF16, i);
      largest = std::max(largest, std::abs(change));
    }
    std::printf("adapter %2d: largest change of an output %g\n", adapter, largest);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
