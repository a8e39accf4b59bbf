// One MoE layer of a published checkpoint, without a copy of the weights on the way and without
// allocation in the forward. Usage: layer CHECKPOINT INPUT.safetensors
#include <fusedmoe/checkpoint.h>
#include <fusedmoe/layer.h>
#include <fusedmoe/safetensors.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) try {
  using namespace fusedmoe;
  if (argc != 3) throw Error("arguments", "not two", "CHECKPOINT INPUT.safetensors");

  const Checkpoint checkpoint = Checkpoint::open(argv[1]);
  const MoeLayer layer(checkpoint.load_layer(checkpoint.moe_layers().front()));
  std::puts(layer.plan_line().c_str());          // what was chosen
  std::puts(layer.selection().table().c_str());  // and why not the others

  const Tensor x = SafetensorsFile::open(argv[2]).tensor("hidden_states");  // (tokens, hidden) bf16
  const std::int64_t num_tokens = x.size(0);
  const Tensor output = Tensor::empty(x.shape(), DType::kBF16);
  const std::size_t bytes = layer.workspace_bytes(num_tokens);
  const Tensor scratch = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8);
  layer.forward(x, output, {scratch.data(), bytes});

  for (std::int64_t i = 0; i < 4 && i < output.numel(); ++i) {
    std::printf("%g ", load_f32(output.data(), output.dtype(), i));
  }
  std::puts("...");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
