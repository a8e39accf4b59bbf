#include "cuda/combine.h"

#include <cuda_bf16.h>

#include <type_traits>

#include "cuda/device/launch.h"

namespace fusedmoe::cuda {
namespace {

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

constexpr int kColumns = 4;  // of a thread

__device__ void load(const float* from, float4& raw) {
  raw = *reinterpret_cast<const float4*>(from);
}
__device__ void load(const __nv_bfloat16* from, uint2& raw) {
  raw = *reinterpret_cast<const uint2*>(from);
}
__device__ void add(float4 raw, float (&sums)[kColumns]) {
  sums[0] += raw.x;
  sums[1] += raw.y;
  sums[2] += raw.z;
  sums[3] += raw.w;
}
__device__ void add(uint2 raw, float (&sums)[kColumns]) {
  sums[0] += __uint_as_float(raw.x << 16);
  sums[1] += __uint_as_float(raw.x & 0xffff0000u);
  sums[2] += __uint_as_float(raw.y << 16);
  sums[3] += __uint_as_float(raw.y & 0xffff0000u);
}

/// A block is kThreads * kColumns columns of one token. The rows of kBatch slots are on their way
/// at the same time: one after the other, each would wait for memory twice. Few registers, so that
/// its blocks wait beside those of a GEMM with tiles of few tokens.
template <typename Row>
__global__ void __launch_bounds__(kThreads, 16) combine_kernel(const CombineParams p) {
  constexpr int kBatch = 4;
  using Raw = std::conditional_t<std::is_same_v<Row, float>, float4, uint2>;
  const std::int64_t token = blockIdx.x;
  const std::int64_t column =
      (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kColumns;
  cudaGridDependencySynchronize();
  if (column >= p.hidden) return;
  const auto* rows = static_cast<const Row*>(p.rows) + column;
  float sums[kColumns] = {};
#pragma unroll 1
  for (int first = 0; first < p.topk; first += kBatch) {
    std::int32_t row[kBatch];
    float weight[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const std::int64_t slot = token * p.topk + first + j;
      row[j] = first + j < p.topk ? p.slot_to_permuted[slot] : -1;
      weight[j] = first + j < p.topk && p.topk_weights ? p.topk_weights[slot] : 1.0f;
    }
    float values[kBatch][kColumns] = {};
#pragma unroll 1
    for (int s = 0; s < p.splits; ++s) {
      Raw raw[kBatch] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (row[j] >= 0) load(rows + s * p.split_pitch + row[j] * p.hidden, raw[j]);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) add(raw[j], values[j]);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      // The weight of a slot without a row need not be finite.
      const float factor = row[j] >= 0 ? weight[j] : 0.0f;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sums[i] = fmaf(factor, values[j][i], sums[i]);
    }
  }
  const __nv_bfloat162 pairs[] = {__floats2bfloat162_rn(sums[0], sums[1]),
                                  __floats2bfloat162_rn(sums[2], sums[3])};
  *reinterpret_cast<uint2*>(p.output + token * p.hidden + column) =
      *reinterpret_cast<const uint2*>(pairs);
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
