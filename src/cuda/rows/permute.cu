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

/// Row `from` to the rows of the token's slots, by so many warps.
template <RowKind kKind>
__device__ __forceinline__ void quantize_to_slots(const PermuteRows& p, const RowTransform& t,
                                                  std::int64_t from, std::int64_t token,
                                                  float scale, int warp, int warps) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int first = warp * kSpanUnits; first < units_of(t); first += warps * kSpanUnits) {
    const uint4 raw = read_unit(t, from, first + lane);
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

/// Warps share the spans of a token's row among themselves and blockIdx.y.
template <RowKind kKind>
__global__ void __launch_bounds__(kThreads) quantize_permuted_kernel(const PermuteRows p) {
  const std::int64_t token = blockIdx.x;
  const int warp = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x / 32);
  let_next_launch_begin();
  wait_for_previous_launch();
  const float scale = scale_of_row<kKind, kWarps>(p.rows, token);
  quantize_to_slots<kKind>(p, p.rows, token, token, scale, warp,
                           static_cast<int>(gridDim.y) * kWarps);
}

/// For gather_rows_kernel().
template <RowKind kKind>
struct WriteToSlots {
  PermuteRows p;

  __device__ int operator()(char* values, char* scales, std::int64_t token) const {
    const int row_bytes = static_cast<int>(p.rows.row_bytes);
    if constexpr (kKind == RowKind::kCopy) return row_bytes;
    RowTransform t = p.rows;
    t.rows = values;
    const float scale = scale_of_row<kKind>(t, 0);
    const int made_bytes = kKind < RowKind::kFp8 ? row_bytes : row_bytes / 2;
    if (t.differ_by_expert() || made_bytes % 16 != 0) {
      quantize_to_slots<kKind>(p, t, 0, token, scale, 0, 1);
      return 0;
    }
    RowTransform made = t;
    made.to = values;
    if (t.scales) made.scales = reinterpret_cast<float*>(scales);
    made.scale_pitch = 1;
    for (int first = 0; first < units_of(t); first += kSpanUnits) {
      const int unit = first + static_cast<int>(threadIdx.x % 32);
      const Converted value = convert_unit<kKind>(t, read_unit(t, 0, unit), 0, scale);
      __syncwarp();  // what is made is shorter than what is read
      write_unit<kKind>(made, 0, unit, value);
    }
    if (t.makes_codes() && t.scales) {
      __syncwarp();
      scales_to_slots([&](int g) { return made.scales[g]; }, scales_of(t), t.scales, t.scale_pitch,
                      p.slot_to_row + token * p.topk, static_cast<int>(p.topk));
    }
    return made_bytes;
  }
  /// Of a row of codes.
  __host__ __device__ static int scales_of(const RowTransform& t) {
    constexpr std::int64_t kGroupBytes = kGroupLanes * kUnitBytes;
    return t.fp8.scale != Fp8Quantizer::Scale::kGroup
               ? 1
               : static_cast<int>((t.row_bytes + kGroupBytes - 1) / kGroupBytes);
  }
};
template <RowKind kKind>
RowArrivals gather(const PermuteRows& args, const GatheredRows& from, const Stream& stream) {
  using Write = WriteToSlots<kKind>;
  const RowTransform& rows = args.rows;
  const std::int64_t made_scales =
      rows.makes_codes() ? std::int64_t{sizeof(float)} * Write::scales_of(rows) : 0;
  return launch_gather(Write{args}, from, args.topk, rows.to, rows.to_pitch, made_scales, stream);
}

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
  switch (args.rows.kind) {
    case RowKind::kCopy:
      return gather<RowKind::kCopy>(args, from, stream);
    case RowKind::kQuantizeAndDecode:
      return gather<RowKind::kQuantizeAndDecode>(args, from, stream);
    case RowKind::kFp8:
      if (!needs_amax(args.rows)) return gather<RowKind::kFp8>(args, from, stream);
      break;
    default:
      break;
  }
  throw Error::internal("such rows are not quantized one by one as they come");
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
