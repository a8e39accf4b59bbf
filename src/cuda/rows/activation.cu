#include "cuda/rows/activation.h"

#include "cuda/device/launch.h"
#include "cuda/rows/activation.cuh"
#include "cuda/rows/element.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 256;

template <typename Element>
__global__ void activate_kernel(const ResolvedActivation activation, const Element* gate_up,
                                Element* output, std::int64_t width, const std::int32_t* num_rows) {
  const bool gated = is_gated_kind(activation.kind);
  const std::int64_t count = *num_rows * width;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    const std::int64_t row = i / width, column = i % width;
    const Element* from = gate_up + row * (gated ? 2 : 1) * width + column;
    const float gate = to_f32(*from);
    output[i] = from_f32<Element>(gated ? activate(activation, gate, to_f32(from[width]))
                                        : activate_gate(activation, gate));
  }
}

}  // namespace

void activate_rows(const ResolvedActivation& activation, DType dtype, const void* gate_up,
                   void* output, std::int64_t rows, std::int64_t width,
                   const std::int32_t* num_rows, const Stream& stream) {
  constexpr std::int64_t kMaxBlocks = 4096;
  const std::int64_t blocks = (rows * width + kThreads - 1) / kThreads;
  dispatch_storage(dtype, [&](auto storage) {
    using Element = decltype(storage);
    launch(activate_kernel<Element>,
           dim3(static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks)), dim3(kThreads),
           0, static_cast<cudaStream_t>(stream.handle), false, activation,
           static_cast<const Element*>(gate_up), static_cast<Element*>(output), width, num_rows);
  });
}

}  // namespace fusedmoe::cuda
