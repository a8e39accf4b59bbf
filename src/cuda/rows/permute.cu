#include "cuda/rows/permute.h"

#include <algorithm>

#include "cuda/device/launch.h"
#include "cuda/device/overlap.cuh"
#include "cuda/rows/expert_of_row.cuh"
#include "cuda/rows/gather_rows.cuh"
#include "cuda/rows/row_transform.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

/// A block reads the row of a token once and writes it to every slot's row, `Unit` by `Unit`.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(const PermuteRows p) {
  constexpr int kUnits = 4;  // of a thread, read at the same time
  const std::int64_t token = blockIdx.x;
  wait_for_previous_launch();
  const auto units = static_cast<int>(p.rows.row_bytes / static_cast<std::int64_t>(sizeof(Unit)));
  const auto* from = reinterpret_cast<const Unit*>(static_cast<const char*>(p.rows.rows) +
                                                   token * p.rows.row_pitch);
  for (int first = 0; first < units; first += kUnits * kThreads) {
    const int unit = first + static_cast<int>(threadIdx.x);
    Unit values[kUnits] = {};
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (unit + u * kThreads < units) values[u] = from[unit + u * kThreads];
    }
    for (int j = 0; j < static_cast<int>(p.topk); ++j) {
      const std::int64_t row = p.slot_to_row[token * p.topk + j];
      if (row < 0) continue;
      auto* to = reinterpret_cast<Unit*>(static_cast<char*>(p.rows.to) + row * p.rows.to_pitch);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        if (unit + u * kThreads < units) to[unit + u * kThreads] = values[u];
      }
    }
  }
}

/// False where rows cannot be cut into units of this type.
template <typename Unit>
bool launch_copy(const PermuteRows& args, const Stream& stream) {
  const RowTransform& rows = args.rows;
  const auto all = reinterpret_cast<std::uintptr_t>(rows.rows) |
                   reinterpret_cast<std::uintptr_t>(rows.to) |
                   static_cast<std::uintptr_t>(rows.row_pitch | rows.to_pitch | rows.row_bytes);
  if (all % sizeof(Unit) != 0) return false;
  launch(copy_rows_kernel<Unit>, dim3(static_cast<unsigned>(args.num_tokens)), dim3(kThreads), 0,
         stream, true, args);
  return true;
}

/// Warps share the spans of a token's row among themselves and blockIdx.y.
template <RowKind kKind>
__global__ void __launch_bounds__(kThreads) quantize_permuted_kernel(const PermuteRows p) {
  const RowTransform& t = p.rows;
  const std::int64_t token = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x / 32);
  let_next_launch_begin();
  wait_for_previous_launch();
  const float scale = scale_of_row<kKind, kWarps>(t, token);
  const int step = static_cast<int>(gridDim.y) * kWarps * kSpanUnits;
  for (int first = warp * kSpanUnits; first < units_of(t); first += step) {
    const uint4 raw = read_unit(t, token, first + lane);
    Converted value{};
    if (!t.differ_by_expert()) value = convert_unit<kKind>(t, raw, 0, scale);
    for (int j = 0; j < static_cast<int>(p.topk); ++j) {
      const std::int64_t slot = token * p.topk + j, row = p.slot_to_row[slot];
      if (row < 0) continue;
      if (t.differ_by_expert())
        value = convert_unit<kKind>(t, raw, p.local_experts(p.topk_ids[slot]), scale);
      write_unit<kKind>(t, row, first + lane, value);
    }
  }
}

/// For gather_rows_kernel().
struct CopyToSlots {
  int row_bytes;
  __device__ int operator()(char*, char*, std::int64_t) const { return row_bytes; }
};

template <RowKind kKind>
__global__ void __launch_bounds__(kThreads) transform_rows_kernel(const TransformRows p) {
  const RowTransform& t = p.rows;
  let_next_launch_begin();
  wait_for_previous_launch();
  const std::int64_t row = blockIdx.x;
  if (!has_expert(p, row)) return;
  const int expert = t.differ_by_expert() ? expert_of_row(p, row) : 0;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x / 32);
  const float scale = scale_of_row<kKind, kWarps>(t, row);
  const int step = static_cast<int>(gridDim.y) * kWarps * kSpanUnits;
  for (int first = warp * kSpanUnits; first < units_of(t); first += step) {
    write_unit<kKind>(t, row, first + lane,
                      convert_unit<kKind>(t, read_unit(t, row, first + lane), expert, scale));
  }
}

/// The same of many narrow rows: a warp for each, which keeps the whole row in registers.
template <RowKind kKind, int kSpans>
__global__ void __launch_bounds__(kThreads) transform_narrow_rows_kernel(const TransformRows p) {
  const RowTransform& t = p.rows;
  let_next_launch_begin();
  wait_for_previous_launch();
  const std::int64_t row = blockIdx.x * std::int64_t{kWarps} + threadIdx.x / 32;
  if (row >= p.num_rows || !has_expert(p, row)) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint4 units[kSpans];
#pragma unroll
  for (int s = 0; s < kSpans; ++s) units[s] = read_unit(t, row, s * kSpanUnits + lane);
  const float scale =
      t.has_row_scales() ? row_scale<kKind>(amax_of_units(t, units)) : scale_of_row<kKind>(t, row);
  const int expert = t.differ_by_expert() ? expert_of_row(p, row) : 0;
#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
    write_unit<kKind>(t, row, s * kSpanUnits + lane,
                      convert_unit<kKind>(t, units[s], expert, scale));
  }
}

/// The largest value of all rows; a warp for each.
__global__ void __launch_bounds__(kThreads)
    amax_of_tokens_kernel(const RowTransform t, std::int64_t rows) {
  wait_for_previous_launch();
  const std::int64_t row = blockIdx.x * std::int64_t{kWarps} + threadIdx.x / 32;
  if (row >= rows) return;
  const float amax = amax_of_row(t, row);
  if (threadIdx.x % 32 == 0) atomicMax(t.fp8.amax, __float_as_uint(amax));
}
__global__ void __launch_bounds__(kThreads) amax_of_rows_kernel(const TransformRows p) {
  wait_for_previous_launch();
  const std::int64_t row = blockIdx.x * std::int64_t{kWarps} + threadIdx.x / 32;
  if (row >= p.num_rows || !has_expert(p, row)) return;
  const float amax = amax_of_row(p.rows, row);
  if (threadIdx.x % 32 == 0) atomicMax(p.rows.fp8.amax, __float_as_uint(amax));
}

bool needs_amax(const RowTransform& rows) {
  return rows.makes_codes() && rows.fp8.scale == Fp8Quantizer::Scale::kTensor;
}
dim3 amax_blocks(std::int64_t rows) {
  return dim3(static_cast<unsigned>((rows + kWarps - 1) / kWarps));
}
/// Few rows are cut among several blocks, each as wide as all its warps read at a time.
dim3 blocks_of(std::int64_t rows, const RowTransform& t) {
  constexpr std::int64_t kManyBlocks = 264;
  const std::int64_t spans =
      (t.row_bytes + kSpanUnits * kUnitBytes - 1) / (kSpanUnits * kUnitBytes);
  const std::int64_t parts =
      std::clamp<std::int64_t>(kManyBlocks / rows, 1, (spans + kWarps - 1) / kWarps);
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(parts));
}

}  // namespace

void permute_rows(const PermuteRows& args, const Stream& stream) {
  if (args.num_tokens == 0 || args.rows.row_bytes == 0) return;
  if (args.rows.kind != RowTransform::Kind::kCopy) {
    if (needs_amax(args.rows)) {
      launch(amax_of_tokens_kernel, amax_blocks(args.num_tokens), dim3(kThreads), 0, stream, true,
             args.rows, args.num_tokens);
    }
    with_kind(args.rows.kind, [&](auto kind) {
      launch(quantize_permuted_kernel<kind()>, blocks_of(args.num_tokens, args.rows),
             dim3(kThreads), 0, stream, true, args);
    });
    return;
  }
  launch_copy<uint4>(args, stream) || launch_copy<std::uint32_t>(args, stream) ||
      launch_copy<std::uint16_t>(args, stream) || launch_copy<std::uint8_t>(args, stream);
}

RowArrivals gather_rows(const PermuteRows& args, const GatheredRows& from, const Stream& stream) {
  if (args.rows.kind != RowKind::kCopy) throw Error::internal("rows that come are not quantized");
  return launch_gather(CopyToSlots{static_cast<int>(args.rows.row_bytes)}, from, args.topk,
                       args.rows.to, args.rows.to_pitch, stream);
}

void transform_rows(const TransformRows& args, bool overlap_previous, const Stream& stream) {
  if (args.num_rows == 0 || args.rows.row_bytes == 0) return;
  if (needs_amax(args.rows)) {
    launch(amax_of_rows_kernel, amax_blocks(args.num_rows), dim3(kThreads), 0, stream,
           overlap_previous, args);
    overlap_previous = true;
  }
  constexpr std::int64_t kManyRows = 512, kSpanBytes = kSpanUnits * kUnitBytes;
  const auto launch_narrow = [&](auto kernel) {
    launch(kernel, dim3(static_cast<unsigned>((args.num_rows + kWarps - 1) / kWarps)),
           dim3(kThreads), 0, stream, overlap_previous, args);
  };
  with_kind(args.rows.kind, [&](auto kind) {
    if (args.num_rows < kManyRows || args.rows.row_bytes > 8 * kSpanBytes) {
      launch(transform_rows_kernel<kind()>, blocks_of(args.num_rows, args.rows), dim3(kThreads), 0,
             stream, overlap_previous, args);
    } else if (args.rows.row_bytes > 4 * kSpanBytes) {
      launch_narrow(transform_narrow_rows_kernel<kind(), 8>);
    } else {
      launch_narrow(transform_narrow_rows_kernel<kind(), 4>);
    }
  });
}

}  // namespace fusedmoe::cuda
