#include "cuda/rows/combine.h"

#include "cuda/device/launch.h"
#include "cuda/device/overlap.cuh"
#include "cuda/rows/element.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 64;

struct CombineParams {
  void* output;
  const void* rows;
  const std::int32_t* slot_to_permuted;  // or null
  const std::int32_t* topk_ids;
  core::LocalExperts local_experts;
  const float* topk_weights;
  std::int64_t split_pitch;
  std::int64_t hidden;
  std::int64_t output_stride;
  int topk, splits;
  bool accumulate;
  RowTargets targets;
  int num_targets;  // that rows are written to in turns: no link gets all of them at once

  __device__ std::int64_t token_in_turn(std::int64_t i) const {
    return num_targets > 0 ? i % num_targets * targets.rows_each + i / num_targets : i;
  }
  template <typename Output>
  __device__ Output* output_of(std::int64_t token) const {
    if (targets.rows_each == 0) return static_cast<Output*>(output) + token * output_stride;
    const std::int64_t row = targets.first_row + token, target = row / targets.rows_each;
    return reinterpret_cast<Output*>(targets.rows[target]) +
           (row - target * targets.rows_each) * output_stride;
  }
};

/// Columns of a thread: 16 bytes of a row.
template <typename Row>
constexpr int kColumnsOf = 16 / static_cast<int>(sizeof(Row));

/// A block is kThreads * kColumns columns of one token. The rows of kBatch slots are on their way
/// at the same time: one after the other, each would wait for memory twice.
template <typename Row, typename Output>
__global__ void __launch_bounds__(kThreads, 12) combine_kernel(const CombineParams p) {
  constexpr int kBatch = 4, kColumns = kColumnsOf<Row>;
  const std::int64_t token = p.token_in_turn(blockIdx.x);
  const std::int64_t column =
      (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kColumns;
  std::int32_t row[kBatch];
  float weight[kBatch];
  const auto read_slots = [&](int first) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const std::int64_t slot = token * p.topk + first + j;
      const bool is_slot = first + j < p.topk;
      row[j] = -1;
      if (is_slot && p.slot_to_permuted) {
        row[j] = p.slot_to_permuted[slot];
      } else if (is_slot && p.local_experts(p.topk_ids[slot]) >= 0) {
        row[j] = static_cast<std::int32_t>(slot);
      }
      weight[j] = is_slot && p.topk_weights ? p.topk_weights[slot] : 1.0f;
    }
  };
  // Ids and weights are older than the routing data, whose kernel GEMM 2 waited for, or which was
  // launched without overlap.
  if (!p.slot_to_permuted) read_slots(0);
  wait_for_previous_launch();
  if (column >= p.hidden) return;
  const bool failed =
      p.targets.rows_each > 0 && *static_cast<const volatile std::uint32_t*>(p.targets.failed) != 0;
  const auto* rows = static_cast<const Row*>(p.rows) + column;
  float sums[kColumns] = {};
  bool has_rows = false;
#pragma unroll 1
  for (int first = 0; first < p.topk; first += kBatch) {
    if (first > 0 || p.slot_to_permuted) read_slots(first);
    float values[kBatch][kColumns] = {};
#pragma unroll 1
    for (int s = 0; s < p.splits; ++s) {
      Pack<Row, kColumns> columns[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        columns[j] = {};
        if (row[j] >= 0) {
          columns[j] = columns[j].load(rows + s * p.split_pitch + row[j] * p.hidden);
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) values[j][i] += to_f32(columns[j].values[i]);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      // The weight of a slot without a row need not be finite.
      has_rows |= row[j] >= 0;
      const float factor = row[j] >= 0 ? weight[j] : 0.0f;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sums[i] = fmaf(factor, values[j][i], sums[i]);
    }
  }
  if (failed || (p.targets.rows_each > 0 && !has_rows)) return;
  store_sums(sums, p.output_of<Output>(token) + column, p.accumulate);
}

}  // namespace

void combine(const Combine& args, const Stream& stream) {
  CombineParams p{};
  p.output = args.output.data();
  p.rows = args.rows;
  p.slot_to_permuted =
      args.slot_to_permuted ? args.slot_to_permuted.as<const std::int32_t>() : nullptr;
  p.topk_ids = args.topk_ids ? args.topk_ids.as<const std::int32_t>() : nullptr;
  p.local_experts = args.local_experts;
  p.topk_weights = args.topk_weights;
  p.split_pitch = args.split_pitch;
  p.hidden = args.output.size(1);
  p.output_stride = args.output.stride(0);
  p.accumulate = args.accumulate;
  p.targets = args.targets;
  const std::int64_t num_tokens = args.output.size(0);
  if (p.targets.rows_each > 0 && num_tokens % p.targets.rows_each == 0) {
    p.num_targets = static_cast<int>(num_tokens / p.targets.rows_each);
  }
  p.topk = static_cast<int>(args.topk);
  p.splits = args.splits;
  const auto launch_kernel = [&](auto row, auto result) {
    using Row = decltype(row);
    constexpr int kColumns = kThreads * kColumnsOf<Row>;
    const dim3 grid(static_cast<unsigned>(num_tokens),
                    static_cast<unsigned>((p.hidden + kColumns - 1) / kColumns));
    launch(combine_kernel<Row, decltype(result)>, grid, dim3(kThreads), 0, stream,
           args.overlap_previous, p);
  };
  dispatch_row_and_output(args.rows_dtype, args.output.dtype(), launch_kernel);
}

}  // namespace fusedmoe::cuda
