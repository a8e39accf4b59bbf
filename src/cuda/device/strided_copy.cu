#include "cuda/device/strided_copy.h"

#include <algorithm>

#include "cuda/device/launch.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 256;

template <typename Element>
__global__ void strided_copy_kernel(const Element* from, std::int64_t row_stride,
                                    std::int64_t column_stride, std::int64_t columns,
                                    std::int64_t count, Element* to) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    to[i] = from[i / columns * row_stride + i % columns * column_stride];
  }
}

template <typename Element>
void copy_elements(const TensorView& from, void* to, const Stream& stream) {
  constexpr std::int64_t kMostBlocks = 1 << 16;
  const std::int64_t blocks = std::min((from.numel() + kThreads - 1) / kThreads, kMostBlocks);
  launch(strided_copy_kernel<Element>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
         stream, false, from.as<const Element>(), from.stride(0), from.stride(1), from.size(1),
         from.numel(), static_cast<Element*>(to));
}

}  // namespace

void copy_strided(const TensorView& from, void* to, const Stream& stream) {
  if (from.numel() == 0) return;
  switch (bytes(from.dtype(), 1)) {
    case 1:
      return copy_elements<std::uint8_t>(from, to, stream);
    case 2:
      return copy_elements<std::uint16_t>(from, to, stream);
    default:
      return copy_elements<std::uint32_t>(from, to, stream);
  }
}

}  // namespace fusedmoe::cuda
