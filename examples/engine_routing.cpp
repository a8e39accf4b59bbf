// Expert parallelism with an engine's own routing: two ranks, here one after the other, hold half
// of the experts each, and an expert map says which. Their layers have no router; each adds its
// partial sum, in f32, to what is there. Usage: engine_routing CHECKPOINT INPUT.safetensors
#include <fusedmoe/checkpoint.h>
#include <fusedmoe/layer.h>
#include <fusedmoe/safetensors.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) try {
  using namespace fusedmoe;
  if (argc != 3) throw Error("arguments", "not two", "CHECKPOINT INPUT.safetensors");
  const Checkpoint checkpoint = Checkpoint::open(argv[1]);
  const LayerWeights whole = checkpoint.load_layer(checkpoint.moe_layers().front());
  const Tensor x = SafetensorsFile::open(argv[2]).tensor("hidden_states");  // (tokens, hidden) bf16
  const std::int64_t num_tokens = x.size(0), topk = whole.router.topk;
  const std::int64_t num_experts = whole.router.num_experts;

  // The engine's choice: token t takes the experts t, t + 1, ... with equal weights.
  const Tensor ids = Tensor::empty({num_tokens, topk}, DType::kI32);
  const Tensor weights = Tensor::empty({num_tokens, topk}, DType::kF32);
  for (std::int64_t slot = 0; slot < ids.numel(); ++slot) {
    ids.as<std::int32_t>()[slot] =
        static_cast<std::int32_t>((slot / topk + slot % topk) % num_experts);
    weights.as<float>()[slot] = 1 / static_cast<float>(topk);
  }

  const Tensor output = Tensor::empty(x.shape(), DType::kF32);
  for (int rank = 0; rank < 2; ++rank) {
    const std::int64_t begin = rank * num_experts / 2, end = (rank + 1) * num_experts / 2;
    LayerWeights part;
    part.router = whole.router;
    part.experts = whole.experts;  // views: nothing is copied
    part.experts.experts.assign(whole.experts.experts.begin() + begin,
                                whole.experts.experts.begin() + end);
    part.expert_map = Tensor::empty({num_experts}, DType::kI32);
    for (std::int64_t e = 0; e < num_experts; ++e) {
      const bool here = e >= begin && e < end;
      part.expert_map.as<std::int32_t>()[e] = here ? static_cast<std::int32_t>(e - begin) : -1;
    }
    LayerOptions options{.output_dtype = DType::kF32};
    options.parallel = {.ep_size = 2, .ep_rank = rank};
    const MoeLayer layer(part, options);
    const std::size_t bytes = layer.workspace_bytes(num_tokens);
    const Tensor scratch = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
    layer.forward_routed(x, {ids, weights}, output, {scratch.data(), bytes},
                         {.accumulate = rank > 0});
    std::printf("after rank %d: first output %g\n", rank, output.as<float>()[0]);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
