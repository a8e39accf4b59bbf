#include "cuda/combine.h"

#include <cuda_bf16.h>

#include "cuda/device/launch.h"

namespace fusedmoe::cuda {
namespace {

constexpr int kColumns = 8;  // of a thread: 16 bytes of bf16
constexpr int kThreads = 64;

struct CombineParams {
  __nv_bfloat16* output;
  const void* rows;
  const std::int32_t* slot_to_permuted;
  const float* topk_weights;
  std::int64_t split_pitch;
  std::int64_t hidden;
  int topk, splits;
};

__device__ void add_row(const float* row, float weight, float (&sums)[kColumns]) {
  const auto low = *reinterpret_cast<const float4*>(row);
  const auto high = *reinterpret_cast<const float4*>(row + 4);
  const float values[kColumns] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sums[i] = fmaf(weight, values[i], sums[i]);
}

__device__ void add_row(const __nv_bfloat16* row, float weight, float (&sums)[kColumns]) {
  const auto raw = *reinterpret_cast<const uint4*>(row);
  const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sums[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), sums[2 * i]);
    sums[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xffff0000u), sums[2 * i + 1]);
  }
}

/// A block is kThreads * kColumns columns of one token.
/// Few registers, so that its blocks wait beside those of a GEMM with tiles of few tokens.
template <typename Row>
__global__ void __launch_bounds__(kThreads, 16) combine_kernel(const CombineParams p) {
  const std::int64_t token = blockIdx.x;
  const std::int64_t column =
      (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kColumns;
  cudaGridDependencySynchronize();
  if (column >= p.hidden) return;
  const auto* rows = static_cast<const Row*>(p.rows);
  float sums[kColumns] = {};
  for (int j = 0; j < p.topk; ++j) {
    const std::int64_t slot = token * p.topk + j;
    const std::int64_t row = p.slot_to_permuted[slot];
    if (row < 0) continue;
    const float weight = p.topk_weights ? p.topk_weights[slot] : 1.0f;
    if (p.splits == 1) {
      add_row(rows + row * p.hidden + column, weight, sums);
      continue;
    }
    float value[kColumns] = {};
    for (int s = 0; s < p.splits; ++s) {
      add_row(rows + s * p.split_pitch + row * p.hidden + column, 1.0f, value);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums[i] = fmaf(weight, value[i], sums[i]);
  }
  uint4 packed;
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    pairs[i] = __floats2bfloat162_rn(sums[2 * i], sums[2 * i + 1]);
  }
  *reinterpret_cast<uint4*>(p.output + token * p.hidden + column) = packed;
}

}  // namespace

void combine(const Combine& args, const Stream& stream) {
  CombineParams p{};
  p.output = args.output.as<__nv_bfloat16>();
  p.rows = args.rows;
  p.slot_to_permuted = args.slot_to_permuted.as<const std::int32_t>();
  p.topk_weights = args.topk_weights;
  p.split_pitch = args.split_pitch;
  p.hidden = args.output.size(1);
  p.topk = static_cast<int>(args.topk);
  p.splits = args.splits;
  const dim3 grid(
      static_cast<unsigned>(args.output.size(0)),
      static_cast<unsigned>((p.hidden + kThreads * kColumns - 1) / (kThreads * kColumns)));
  launch(args.rows_f32 ? combine_kernel<float> : combine_kernel<__nv_bfloat16>, grid,
         dim3(kThreads), 0, static_cast<cudaStream_t>(stream.handle), args.overlap_previous, p);
}

}  // namespace fusedmoe::cuda
