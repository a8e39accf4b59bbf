// Top-k ids (num_tokens, topk) -> bit matrix (num_tokens, ceil(num_local_experts / 32)).
//
// A thread makes one word from all ids of its token, so nothing needs to be cleared first and no
// two threads write the same word.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/device/launch.h"
#include "cuda/router/kernels.h"

namespace fusedmoe::cuda {
namespace {

__global__ void bitmatrix_kernel(const BitmatrixParams p) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  const std::int64_t num_threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < p.num_tokens * p.num_words; i += num_threads) {
    const std::int64_t token = i / p.num_words, word = i % p.num_words;
    std::uint32_t bits = 0;
    for (std::int64_t j = 0; j < p.topk; ++j) {
      const std::int32_t expert = p.local_expert(p.ids[token * p.topk + j]);
      // An arithmetic shift: -1 stays negative and matches no word.
      if (expert >> 5 == word) bits |= 1u << (expert % 32);
    }
    p.bits[i] = bits;
  }
}

// ---------------------------------------------------------------------------------------------

}  // namespace

void launch_bitmatrix(const BitmatrixParams& params, Stream stream) {
  constexpr std::int64_t kThreads = 256, kMaxBlocks = 1 << 16;
  const std::int64_t words = params.num_tokens * params.num_words;
  const std::int64_t blocks = std::min((words + kThreads - 1) / kThreads, kMaxBlocks);
  launch(bitmatrix_kernel, dim3(static_cast<unsigned>(blocks)),
         dim3(static_cast<unsigned>(kThreads)), 0, stream, false, params);
}

}  // namespace fusedmoe::cuda
