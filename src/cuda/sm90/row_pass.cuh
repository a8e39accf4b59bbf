// The row pass: tiles of their own, between those of the GEMMs, in which epilogue warpgroups
// quantize what GEMM 1 has stored: with 8 to 128 tokens 2 to 5 % faster than a launch between the
// GEMMs.
#pragma once

#include "cuda/mlp/epilogue.cuh"
#include "cuda/mlp/stored_rows.cuh"
#include "cuda/rows/row_transform.cuh"

namespace fusedmoe::cuda::sm90 {

/// function(unit, value) for a thread's units of a row, every `threads`-th; several are read at the
/// same time. All lanes of a warp call it together, with zeros behind the end of the row. There is
/// one copy of the function's code, and the units move up: four copies make a kernel 15 KB larger.
template <typename Function>
__device__ __forceinline__ void for_units(const RowTransform& t, std::int64_t row, int thread,
                                          int threads, const Function& function) {
  constexpr int kBatch = 4;
  const int num_units = units_of(t);
#pragma unroll 1
  for (int first = thread; first - thread % 32 < num_units; first += kBatch * threads) {
    uint4 units[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) units[i] = read_unit(t, row, first + i * threads);
#pragma unroll 1
    for (int unit = first; unit < first + kBatch * threads; unit += threads) {
      if (unit - thread % 32 >= num_units) break;
      function(unit, units[0]);
#pragma unroll
      for (int i = 1; i < kBatch; ++i) units[i - 1] = units[i];
    }
  }
}

/// The rows of a tile of the row pass, by the epilogue warpgroup: a warp takes a row, all four
/// together take one of more than 2048 values.
template <typename K>
__device__ __forceinline__ void quantize_rows(SharedMemory<K>& shared, const FusedMlpParams& p,
                                              const WorkTile& tile) {
  constexpr int kWideUnits = 256;
  constexpr bool kIsF16 = K::Operands::kRowDType == DType::kF16;
  using Pair = std::conditional_t<kIsF16, __half2, __nv_bfloat162>;
  const WarpgroupCoords<K> coords{0};
  const RowTransform& t = p.pass.rows;
  const bool is_wide = units_of(t) > kWideUnits;
  const int warp = coords.thread() / 32, threads = is_wide ? 128 : 32;
  const int thread = coords.thread() % threads, end = tile.first_row + tile.num_tokens;
  wait_for_previous(p);
  wait_until_stored(p, tile, p.gemms[0].row_blocks);
#pragma unroll 1
  for (int row = tile.first_row + (is_wide ? 0 : warp); row < end; row += is_wide ? 1 : 4) {
    float scale = t.fp8.static_scale;
    if (t.has_row_scales()) {
      Pair largest(0.0F, 0.0F);
      for_units(t, row, thread, threads,
                [&](int, const uint4& unit) { take_larger(unit, largest); });
      float amax = amax_of_lanes<32>(larger(largest));
      if (is_wide) {
        sync_warpgroup(coords);  // those of the row before are read
        shared.row_amax[warp] = amax;
        sync_warpgroup(coords);
        for (const float of_warp : shared.row_amax) amax = fmaxf(amax, of_warp);
      }
      scale = core::e4m3_row_scale(amax);
    }
    for_units(t, row, thread, threads, [&](int unit, const uint4& raw) {
      write_unit<RowKind::kFp8>(t, row, unit, to_fp8(t, raw, scale));
    });
  }
}

}  // namespace fusedmoe::cuda::sm90
