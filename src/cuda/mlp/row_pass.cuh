// The row pass: tiles of their own, between those of the GEMMs, in which warpgroups quantize what
// GEMM 1 has stored: faster than a launch between the GEMMs where tokens are few.
#pragma once

#include "cuda/mlp/epilogue.cuh"
#include "cuda/rows/row_transform.cuh"

namespace fusedmoe::cuda {

/// function(unit, value) for a thread's units of a row, of which `warps` warps have 32 each in
/// turns; several are read at the same time. All lanes of a warp call it together, with zeros
/// behind the end of the row. There is one copy of the function's code, and the units move up: four
/// copies make a kernel 15 KB larger.
template <typename Function>
__device__ __forceinline__ void for_units(const RowTransform& t, std::int64_t row, int warp,
                                          int warps, const Function& function) {
  constexpr int kBatch = 4;
  const int num_units = units_of(t), lane = static_cast<int>(threadIdx.x % 32);
  const int step = 32 * warps;
#pragma unroll 1
  for (int first = 32 * warp; first < num_units; first += kBatch * step) {
    uint4 units[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) units[i] = read_unit(t, row, first + i * step + lane);
#pragma unroll 1
    for (int unit = first; unit < min(first + kBatch * step, num_units); unit += step) {
      function(unit + lane, units[0]);
#pragma unroll
      for (int i = 1; i < kBatch; ++i) units[i - 1] = units[i];
    }
  }
}

/// The rows of a tile of the row pass, by K::kPassWarpgroups warpgroups, of which this thread is in
/// number `group`: a warp takes a row, all four of a warpgroup together take one of more than 2048
/// values. All warpgroups take the same number of turns, in the last maybe without a row, so that
/// they meet at their barriers equally often. All lanes of a warp take the same branches, and the
/// compiler knows: else it keeps less in uniform registers.
template <typename K>
__device__ __forceinline__ void quantize_rows(SharedMemory<K>& shared, const RowTransform& t,
                                              const WorkTile& tile, int group) {
  constexpr int kWideUnits = 256, kGroups = K::kPassWarpgroups;
  constexpr bool kIsF16 = K::Operands::kRowDType == DType::kF16;
  using Pair = std::conditional_t<kIsF16, __half2, __nv_bfloat162>;
  const bool is_wide = units_of(t) > kWideUnits;
  const int warp = __shfl_sync(~0U, static_cast<int>(threadIdx.x) % 128 / 32, 0);
  const int warps = is_wide ? 4 : 1, own_warp = is_wide ? warp : 0;
  const int end = tile.first_row + tile.num_tokens;
  const int turn = is_wide ? kGroups : 4 * kGroups;
#pragma unroll 1
  for (int first = tile.first_row; first < end; first += turn) {
    const int row = first + (is_wide ? group : 4 * group + warp);
    const bool has_row = row < end;
    float scale = t.fp8.static_scale;
    if (t.has_row_scales()) {
      Pair largest(0.0F, 0.0F);
      if (has_row) {
        for_units(t, row, own_warp, warps,
                  [&](int, const uint4& unit) { take_larger(unit, largest); });
      }
      float amax = amax_of_lanes<32>(larger(largest));
      if (is_wide) {
        sync_threads(128, group);  // those of the row before are read
        shared.row_amax[group][warp] = amax;
        sync_threads(128, group);
        for (const float of_warp : shared.row_amax[group]) amax = fmaxf(amax, of_warp);
      }
      scale = row_scale<K::kPassKind>(amax);
    }
    if (!has_row) continue;
    for_units(t, row, own_warp, warps, [&](int unit, const uint4& raw) {
      write_unit<K::kPassKind>(t, row, unit, convert_unit<K::kPassKind>(t, raw, 0, scale));
    });
  }
}

}  // namespace fusedmoe::cuda
