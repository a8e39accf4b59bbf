// A layer on a GPU, on the engine's stream and in a CUDA graph. One forward before the capture
// loads the kernels. The graph reads and writes the buffers that it was captured with, so a step
// copies its input there; scratch is the engine's. Usage: cuda_graph CHECKPOINT INPUT.safetensors
#include <fusedmoe/checkpoint.h>
#include <fusedmoe/layer.h>
#include <fusedmoe/runtime.h>
#include <fusedmoe/safetensors.h>

#include <cstdio>
#include <exception>
#include <string>

int main(int argc, char** argv) try {
  using namespace fusedmoe;
  if (argc != 3) throw Error("arguments", "not two", "CHECKPOINT INPUT.safetensors");
  const Device gpu{DeviceKind::kCuda, 0};
  if (const std::string problem = device_problem(gpu); !problem.empty()) {
    std::printf("nothing to do without a GPU: %s\n", problem.c_str());
    return 0;
  }

  const Checkpoint checkpoint = Checkpoint::open(argv[1]);
  const MoeLayer layer(checkpoint.load_layer(checkpoint.moe_layers().front()), {.device = gpu});
  const Tensor x = SafetensorsFile::open(argv[2]).tensor("hidden_states");  // (tokens, hidden) bf16

  // Memory that stays where it is as long as the graph lives.
  const Tensor input = Tensor::empty(x.shape(), DType::kBF16, gpu);
  const Tensor output = Tensor::empty(x.shape(), DType::kBF16, gpu);
  const std::size_t bytes = layer.workspace_bytes(x.size(0));
  const Tensor scratch = Tensor::empty({static_cast<std::int64_t>(bytes)}, DType::kU8, gpu);

  const OwnedStream owned(gpu);  // an engine writes: const Stream stream{gpu, its cudaStream_t};
  const Stream stream = owned;
  const auto step = [&] {
    layer.forward(input, output, {scratch.data(), bytes}, {.stream = stream});
  };
  copy(x, input, stream);
  step();  // warm-up: outside of the capture
  synchronize(stream);

  // Instead of Graph: cudaStreamBeginCapture, the same call, cudaStreamEndCapture.
  const Graph graph(stream, step);
  for (int token = 0; token < 3; ++token) {
    copy(x, input, stream);
    graph.launch(stream);
  }
  synchronize(stream);
  const Tensor result = to_device(output, {});
  std::printf("%s: first output %g\n", layer.plan_line().c_str(),
              load_f32(result.data(), result.dtype(), 0));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
