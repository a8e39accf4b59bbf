// The kernel of gather_rows.h. Warps go through the rows of the experts in order. A token has a row
// for each of its experts, and the warp that meets the first of them brings the token: bulk copies
// bring its row to shared memory, and from there to all of its rows. So each token comes once, and
// the rows of one expert are complete roughly before those of the next. Each warp brings one token
// at a time, and all warps together hundreds.
#pragma once

#include <algorithm>

#include "core/ceil_div.h"
#include "cuda/device/bulk_rows.cuh"
#include "cuda/device/launch.h"
#include "cuda/device/overlap.cuh"
#include "cuda/rows/gather_rows.h"

namespace fusedmoe::cuda {

inline constexpr int kGatherBlocks = 48, kMostGatherWarps = 32;

/// As in GatheredRows.
struct GatherParams {
  RowSources from;
  const std::int32_t* row_slots;    // permuted_to_slot
  const std::int32_t* slot_to_row;  // (tokens, topk)
  const std::int32_t* num_rows;
  std::int32_t* arrivals;
  char* to;  // what is copied, for each row
  std::int64_t to_pitch;
  int topk;
  int stage_bytes, scales_offset, barrier_offset;  // of a warp's shared memory
};

/// The row that is looked at as number i. Neighbours often lie on one source, and all ranks would
/// read from it at the same time. So within a window of rows the order is another.
inline constexpr int kGatherWindow = 2048;
__device__ inline int row_in_turn(int i) {
  constexpr int kStep = 1237;
  return i / kGatherWindow * kGatherWindow + i % kGatherWindow * kStep % kGatherWindow;
}

/// Bytes of a row to shared memory, by a warp. What is no multiple of 16 bytes comes by loads; the
/// others by a copy that completes on `full`: returned are its bytes.
__device__ inline int load_row(void* to, const std::byte* from, int bytes, std::uint64_t* full) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto by_loads = [&](auto unit) {
    using Unit = decltype(unit);
    for (int i = lane; i < bytes / static_cast<int>(sizeof(Unit)); i += 32) {
      static_cast<Unit*>(to)[i] = reinterpret_cast<const volatile Unit*>(from)[i];
    }
  };
  const auto all = reinterpret_cast<std::uintptr_t>(from) | static_cast<std::uintptr_t>(bytes);
  if (all % 16 == 0) {
    if (lane == 0) bulk_load(to, from, bytes, full);
    return bytes;
  }
  all % 4 == 0 ? by_loads(std::uint32_t{}) : by_loads(std::uint8_t{});
  return 0;
}

/// Those of this warp's rows that no expert before has, one after the other. It looks at 32 at a
/// time.
class FirstRows {
 public:
  __device__ FirstRows(const GatherParams& p, int first, int step)
      : num_rows_(*p.num_rows), next_(first), step_(step) {
    end_ = (num_rows_ + kGatherWindow - 1) / kGatherWindow * kGatherWindow;
  }
  /// The token of the next row; -1: there is none.
  __device__ int next_token(const GatherParams& p) {
    while (found_ == 0) {
      if (next_ >= end_) return -1;
      const int i = next_ + static_cast<int>(threadIdx.x % 32) * step_, row = row_in_turn(i);
      bool is_first = i < end_ && row < num_rows_;
      if (is_first) {
        token_ = p.row_slots[row] / p.topk;
        for (int j = 0; j < p.topk; ++j) {
          const int other = p.slot_to_row[std::int64_t{token_} * p.topk + j];
          if (other >= 0 && other < row) is_first = false;
        }
      }
      found_ = __ballot_sync(~0U, is_first);
      next_ += 32 * step_;
    }
    const int token = __shfl_sync(~0U, token_, __ffs(static_cast<int>(found_)) - 1);
    found_ &= found_ - 1;
    return token;
  }

 private:
  int num_rows_, next_, step_, end_ = 0;
  int token_ = 0;            // of the row that this lane has looked at
  std::uint32_t found_ = 0;  // lanes
};

/// By a warp that has written the rows of a token's slots: they are here.
__device__ inline void count_rows(const GatherParams& p, const std::int32_t* rows) {
  constexpr int kRows = RowArrivals::kRows;
  __syncwarp();  // each lane tells what all of them have written
  __threadfence();
  for (int j = static_cast<int>(threadIdx.x % 32); j < p.topk; j += 32) {
    if (rows[j] < 0) continue;
    const bool is_last = rows[j] == *p.num_rows - 1;
    const int padding = is_last ? kRows - 1 - rows[j] % kRows : 0;
    atomicAdd(p.arrivals + 1 + rows[j] / kRows, 1 + padding);
  }
}

/// write(values, scales, token), by a warp, writes the scales of a row in shared memory to the rows
/// of the token's slots. It returns the bytes of the values that these get, too, a multiple of 16;
/// or 0 if it has written the values, too.
template <typename Write>
__global__ void __launch_bounds__(32 * kMostGatherWarps, 1)
    gather_rows_kernel(const __grid_constant__ GatherParams p,
                       const __grid_constant__ Write write) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // what it is launched on
  extern __shared__ __align__(16) char memory[];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  char* const values = memory + warp * p.stage_bytes;
  char* const scales = values + p.scales_offset;
  auto* const full = reinterpret_cast<std::uint64_t*>(values + p.barrier_offset);
  if (lane == 0) init_bulk_barrier(full);
  __syncwarp();
  wait_for_previous_launch();
  fence_bulk();
  let_next_launch_begin();
  const bool failed = *static_cast<const volatile std::uint32_t*>(p.from.failed) != 0;
  const int value_bytes = static_cast<int>(p.from.value_bytes),
            scale_bytes = static_cast<int>(p.from.scale_bytes);
  FirstRows first_rows(p, static_cast<int>(blockIdx.x + gridDim.x * warp),
                       static_cast<int>(gridDim.x * blockDim.x / 32));
  std::uint32_t phase = 0;
  for (int token = first_rows.next_token(p); token >= 0; token = first_rows.next_token(p)) {
    const std::int32_t* rows = p.slot_to_row + std::int64_t{token} * p.topk;
    if (!failed) {
      const std::int64_t row = p.from.first_row + token, source = row / p.from.rows_each;
      const std::int64_t of_source = row - source * p.from.rows_each;
      int bytes =
          load_row(values, p.from.values[source] + of_source * value_bytes, value_bytes, full);
      if (scale_bytes > 0) {
        bytes +=
            load_row(scales, p.from.scales[source] + of_source * scale_bytes, scale_bytes, full);
      }
      if (lane == 0) expect_bulk_bytes(full, bytes);
      __syncwarp();
      wait_for_bulk(full, phase);
      phase ^= 1;
      const int copied_bytes = write(values, scales, token);
      fence_bulk_shared();
      __syncwarp();
      for (int j = lane; copied_bytes > 0 && j < p.topk; j += 32) {
        if (rows[j] >= 0) bulk_store(p.to + rows[j] * p.to_pitch, values, copied_bytes);
      }
      wait_for_bulk_stores();
    }
    count_rows(p, rows);
  }
  __syncwarp();
  __threadfence();
  if (lane == 0) atomicAdd(p.arrivals, 1);
#endif
}

template <typename Write>
RowArrivals launch_gather(const Write& write, const GatheredRows& from, std::int64_t topk, void* to,
                          std::int64_t to_pitch, const Stream& stream) {
  constexpr std::int64_t kUnit = 16;
  const RowSources& sources = from.sources;
  GatherParams p{};
  p.from = sources;
  p.row_slots = from.routing.permuted_to_slot.as<const std::int32_t>();
  p.slot_to_row = from.routing.slot_to_permuted.as<const std::int32_t>();
  p.num_rows = from.routing.expert_offsets.as<const std::int32_t>() + from.num_experts;
  p.arrivals = from.arrivals;
  p.to = static_cast<char*>(to);
  p.to_pitch = to_pitch;
  p.topk = static_cast<int>(topk);
  p.scales_offset = static_cast<int>(core::round_up(sources.value_bytes, kUnit));
  p.barrier_offset = p.scales_offset + static_cast<int>(core::round_up(sources.scale_bytes, kUnit));
  p.stage_bytes = p.barrier_offset + static_cast<int>(kUnit);
  const auto fit = static_cast<int>(limits_of(stream.device).block_shared_bytes / p.stage_bytes);
  const int warps = std::clamp(fit, 1, kMostGatherWarps);
  launch(gather_rows_kernel<Write>, dim3(kGatherBlocks), dim3(static_cast<unsigned>(32 * warps)),
         static_cast<std::size_t>(warps * p.stage_bytes), stream, true, p, write);
  return {from.arrivals, kGatherBlocks * warps};
}

}  // namespace fusedmoe::cuda
