// What a thread block brings to its shared memory before it multiplies: token rows and factors.
#pragma once

#include "cuda/one_token/block_work.cuh"
#include "cuda/one_token/weight_fragment.cuh"
#include "cuda/rows/row_transform.cuh"

namespace fusedmoe::cuda {

/// Token rows -> the words of a GEMM: a block reads, quantizes and decodes them as the scheme says.
/// Not unrolled: code that is executed once or twice is to be short, as it comes from memory.
template <typename Operands>
struct RowFiller {
  /// A unit is 8 elements: 16 bytes of what is read, and 8 of E4M3 codes.
  static constexpr unsigned kUnitElements = 8;
  static constexpr unsigned kUnitsOfBlock = Operands::kBlock.k / kUnitElements;

  const RowTransform& t;
  const ActiveSlots& active;
  const BlockMemory& memory;
  unsigned rows, k_blocks;
  bool of_slots;

  __device__ static unsigned lane() { return threadIdx.x % 32; }

  /// Calls function(unit's 16 bytes, row, unit) for the spans of the warp: 32 units of a row. The
  /// next one is read meanwhile.
  template <typename Function>
  __device__ __forceinline__ void for_spans(const Function& function) const {
    const unsigned units = units_of(t), of_row = (k_blocks * kUnitsOfBlock + 31) / 32;
    unsigned row = threadIdx.x / 32 / of_row, span = threadIdx.x / 32 % of_row;
    const auto read = [&] {
      const int slot = of_slots ? __shfl_sync(~0U, active.slot, static_cast<int>(row % 32)) : 0;
      const char* from = static_cast<const char*>(t.rows) + slot * t.row_pitch;
      const unsigned unit = span * 32 + lane();
      uint4 value{};
      if (row < rows && unit < units) value = __ldcg(reinterpret_cast<const uint4*>(from) + unit);
      return value;
    };
    uint4 next = read();
#pragma unroll 1
    while (row < rows) {
      const uint4 current = next;
      const unsigned of_current = row, unit = span * 32 + lane();
      for (span += kOneTokenWarps; span >= of_row; span -= of_row) ++row;
      next = read();
      function(current, of_current, unit);
    }
  }

  __device__ __forceinline__ void fill(float* row_amax) const {
    if (kIsFp8<Operands> && t.has_row_scales()) {
      if (threadIdx.x < rows) row_amax[threadIdx.x] = 0;
      __syncthreads();
      for_spans([&](const uint4& raw, unsigned row, unsigned) {
        const uint4 units[1] = {raw};
        const float amax = amax_of_units(t, units);
        if (lane() == 0) atomicMax(reinterpret_cast<int*>(&row_amax[row]), __float_as_int(amax));
      });
      __syncthreads();
    }
    for_spans(
        [&](const uint4& raw, unsigned row, unsigned unit) { convert(raw, row, unit, row_amax); });
  }

  __device__ __forceinline__ void convert(const uint4& raw, unsigned row, unsigned unit,
                                          const float* row_amax) const {
    Converted value{raw, 1};
    if constexpr (kIsFp8<Operands>) {
      const bool is_static = t.fp8.scale == Fp8Quantizer::Scale::kStatic;
      const float row_scale = is_static            ? t.fp8.static_scale
                              : t.has_row_scales() ? core::e4m3_row_scale(row_amax[row])
                                                   : 1.0F;
      value = to_fp8(t, raw, row_scale);
      if (is_static) value.scale = 1;  // part of the weights' own
    } else if constexpr (Operands::Output::kQuantizes) {
      if (t.kind == RowTransform::Kind::kQuantizeAndDecode) {
        const int expert = __shfl_sync(~0U, active.expert, static_cast<int>(row));
        value.data = quantize_and_decode(t.decoded, expert, raw, ~0U);
      }
    }
    if (unit >= k_blocks * kUnitsOfBlock) return;
    const std::uint32_t converted[4] = {value.data.x, value.data.y, value.data.z, value.data.w};
    constexpr unsigned kWords = kUnitElements * sizeof(typename Operands::Activation) / 4;
    const unsigned block = row * k_blocks + unit / kUnitsOfBlock;
#pragma unroll
    for (unsigned w = 0; w < kWords; ++w) {
      const FragmentIndex at = fragment_index<Operands>(unit % kUnitsOfBlock * kWords + w);
      std::uint32_t* to = memory.words + (block * 4 + at.lane) * kLaneWords<Operands> +
                          at.step * (kLaneWords<Operands> / 4) + at.second;
      if constexpr (kIsFp8<Operands>) {
        to[0] = fp8_to_f16(converted[w], 0);
        to[2] = fp8_to_f16(converted[w], 1);
      } else {
        to[0] = converted[w];
      }
    }
    if (kIsFp8<Operands> && unit % kUnitsOfBlock == 0) memory.scales[block] = value.scale;
  }
};

/// What the sums of weight rows are multiplied by.
__device__ __forceinline__ void fill_factors(const BlockWork& work, const BlockMemory& memory) {
  const unsigned count = work.segments() * kSliceRows;
#pragma unroll 1
  for (unsigned i = threadIdx.x; i / 32 * 32 < count; i += kOneTokenThreads) {
    const Segment segment(work, i / kSliceRows);
    const int lane = static_cast<int>(segment.slot % 32);
    const int expert = __shfl_sync(~0U, work.active.expert, lane);
    const float weight = __shfl_sync(~0U, work.active.weight, lane);
    if (i >= count) continue;
    const unsigned row = segment.slice * kSliceRows + i % kSliceRows;
    const std::int64_t first = std::int64_t{expert} * work.gemm.row_blocks * kBlockRows;
    const float scale = work.gemm.scales ? work.gemm.scales[first + row] : 1.0F;
    memory.factors[i] = work.adds_slots ? scale * weight : scale;
  }
}

}  // namespace fusedmoe::cuda
