// How fast a GPU streams weights that lie in its memory: bulk copies to shared memory by every
// multiprocessor and nothing else, from event to event. A layer of few tokens is hardly faster.
//
// Before each run 256 MiB are written, as `fusedmoe bench` does; that leaves lines in the L2 which
// must go to memory before others take their place. With read_flush other 256 MiB are read after
// that, so that no such lines are left.
#include <benchmark/benchmark.h>
#include <cutlass/arch/barrier.h>

#include <cstdint>
#include <string>

#include "cuda/device/launch.h"
#include "cuda/sm90/bulk_copy.cuh"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {
namespace {

using Barrier = cutlass::arch::ClusterTransactionBarrier;

const Device kGpu{DeviceKind::kCuda, 0};
constexpr int kChunkBytes = 32 << 10;
constexpr int kStages = 6;
constexpr std::int64_t kFlushBytes = std::int64_t{256} << 20;
constexpr std::int64_t kWeightBytes = std::int64_t{2} << 30;  // runs read different parts of it

__global__ void stream_kernel(const std::uint8_t* data, int chunks, std::uint64_t hint) {
  extern __shared__ __align__(1024) std::uint8_t stages[][kChunkBytes];
  __shared__ std::uint64_t full[kStages];
  if (threadIdx.x != 0) return;
  for (std::uint64_t& barrier : full) Barrier::init(&barrier, 1);
  cutlass::arch::fence_barrier_init();
  const auto chunk_of = [](int i) { return static_cast<int>(blockIdx.x + i * gridDim.x); };
  const auto copy = [&](int i) {
    if (chunk_of(i) >= chunks) return;
    Barrier::arrive_and_expect_tx(&full[i % kStages], kChunkBytes);
    sm90::bulk_copy(stages[i % kStages], data + std::int64_t{chunk_of(i)} * kChunkBytes,
                    kChunkBytes, &full[i % kStages], hint);
  };
  for (int i = 0; i < kStages; ++i) copy(i);
  for (int i = 0; chunk_of(i) < chunks; ++i) {
    Barrier::wait(&full[i % kStages], i / kStages % 2);
    copy(i + kStages);
  }
}

__global__ void read_kernel(const uint4* data, std::int64_t count, unsigned* result) {
  unsigned sum = 0;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    sum += data[i].x;
  }
  if (sum == 1) *result = sum;  // never, but the compiler does not know
}

/// Megabytes (10^6), whether the weights are evicted first, whether the flush ends with reads.
void BM_Stream(benchmark::State& state) {
  if (const std::string problem = device_problem(kGpu); !problem.empty()) {
    state.SkipWithError(problem.c_str());
    return;
  }
  static const Tensor weights = Tensor::zeros({kWeightBytes}, DType::kU8, kGpu);
  static const Tensor flushed = Tensor::zeros({kFlushBytes}, DType::kU8, kGpu);
  static const Tensor other = Tensor::zeros({kFlushBytes}, DType::kU8, kGpu);
  const std::int64_t bytes = state.range(0) * 1'000'000 / kChunkBytes * kChunkBytes;
  const OwnedStream owned(kGpu);
  const Stream stream = owned;
  auto* const handle = static_cast<cudaStream_t>(stream.handle);
  Event start(kGpu), end(kGpu);
  int multiprocessors = 0;
  FUSEDMOE_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  const auto blocks = static_cast<unsigned>(multiprocessors);
  std::int64_t first = 0;
  const auto run_ms = [&] {
    first = first + 2 * bytes <= kWeightBytes ? first + bytes : 0;
    fill_bytes(flushed, 0, stream);
    if (state.range(2)) {
      launch(read_kernel, dim3(8 * blocks), dim3(256), 0, handle, false, other.as<const uint4>(),
             kFlushBytes / 16, other.as<unsigned>());
    }
    start.record(stream);
    launch(stream_kernel, dim3(blocks), dim3(32), kStages * kChunkBytes, handle, false,
           weights.as<const std::uint8_t>() + first, static_cast<int>(bytes / kChunkBytes),
           state.range(1) ? sm90::kEvictFirst : sm90::kEvictNormal);
    end.record(stream);
    return elapsed_ms(start, end);
  };
  run_ms();  // loads the kernels
  for (auto _ : state) state.SetIterationTime(1e-3 * run_ms());
  state.SetBytesProcessed(state.iterations() * bytes);
}

// One token: gpt-oss-20b in MXFP4, qwen3-30b-a3b and gpt-oss-20b in bf16.
BENCHMARK(BM_Stream)
    ->ArgNames({"MB", "evict_first", "read_flush"})
    ->ArgsProduct({{53, 75, 199}, {0, 1}, {0, 1}})
    ->UseManualTime()
    ->Iterations(60)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace fusedmoe::cuda

BENCHMARK_MAIN();
