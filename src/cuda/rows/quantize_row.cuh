// Quantizes a row by a team of threads, as it travels between ranks: see quantize_rows.h.
#pragma once

#include <cstdint>
#include <optional>

#include "core/check.h"
#include "cuda/rows/element.cuh"
#include "cuda/rows/row_transform.cuh"
#include "quant/quantize.h"

namespace fusedmoe::cuda {

inline constexpr int kColumns = 8;  // of a thread at a time
inline constexpr int kMxLanes = 32 / kColumns;

/// What the kernels must know of a key.
struct CodeFormat {
  enum class Scale : std::uint8_t { kStatic, kRow, kGroup, kMx };
  Scale scale;
  int group_lanes;     // threads that share a scale, of kGroup and kMx
  bool e2m1;           // codes of 4 bits; else E4M3
  bool e8m0;           // scales; else f32
  MxScaleRule rule;    // of kMx
  float static_scale;  // of kStatic
};

inline CodeFormat format_of(const QuantKey& key, std::optional<float> static_scale) {
  using Scale = CodeFormat::Scale;
  CodeFormat format{};
  format.e2m1 = key.value == DType::kE2M1;
  format.e8m0 = key.scale == DType::kE8M0;
  format.rule = key.scale_rule;
  format.static_scale = static_scale.value_or(1);
  format.group_lanes = key.group.cols > 0 ? static_cast<int>(key.group.cols) / kColumns : 1;
  format.scale = !key.dynamic           ? Scale::kStatic
                 : key.group.cols < 0   ? Scale::kRow
                 : key.group.cols == 32 ? Scale::kMx
                                        : Scale::kGroup;
  return format;
}

struct QuantizeParams {
  CodeFormat format;
  const void* x;
  std::int64_t rows;
  std::int64_t stride;  // elements between rows
  std::int64_t columns;
  std::uint8_t* codes;
  void* scales;
  std::int64_t scales_of_row;
};

/// Checks that columns are a multiple of 8, and that there is a scale where the key is static
/// alone.
inline QuantizeParams quantize_params(const TensorView& x, const QuantKey& key,
                                      std::optional<float> scale, const core::QuantizedViews& out) {
  const std::int64_t columns = x.size(1);
  if (scale && key.dynamic) throw Error::conflict("scale", "a dynamic key");
  if (!scale && !key.dynamic) {
    throw Error::invalid("scale", "scale is missing: static keys need one");
  }
  FUSEDMOE_CHECK(columns % kColumns == 0, "columns", core::to_string(columns),
                 "a multiple of 8 on cuda");
  QuantizeParams params{};
  params.format = format_of(key, scale);
  params.x = x.data();
  params.rows = x.size(0);
  params.stride = x.stride(0);
  params.columns = columns;
  params.codes = out.values.as<std::uint8_t>();
  params.scales = out.scales.data();
  params.scales_of_row = core::scales_per_row(key, columns);
  return params;
}
/// function(Storage{}, is_aligned) of quantize_row().
template <typename Function>
void with_rows_of(const TensorView& x, const Function& function) {
  dispatch_storage(x.dtype(), [&](auto element) {
    using Storage = decltype(element);
    const auto* data = x.as<const Storage>();
    dispatch_width<Storage>(
        x.size(1),
        [&](auto width) { function(element, std::bool_constant<(decltype(width)::value > 1)>{}); },
        data, data + x.stride(0));
  });
}

/// 8 neighbours of a row as they are stored; zeros behind its end.
template <typename Storage, bool kAligned>
struct RawColumns {
  static constexpr int kWidth = kAligned ? 16 / static_cast<int>(sizeof(Storage)) : 1;
  Pack<Storage, kWidth> packs[kColumns / kWidth];

  __device__ __forceinline__ void load(const Storage* row, int column, int columns) {
#pragma unroll
    for (int i = 0; i < kColumns / kWidth; ++i) {
      packs[i] = {};
      if (column < columns) packs[i] = Pack<Storage, kWidth>::load(row + column + i * kWidth);
    }
  }
  __device__ __forceinline__ void values(UnitValues& values) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float2& pair = values[i / 2];
      (i % 2 == 0 ? pair.x : pair.y) = to_f32(packs[i / kWidth].values[i % kWidth]);
    }
  }
};

/// By a team of a block: kThreads neighbours.
template <typename Storage, bool kAligned, int kThreads>
__device__ float amax_of_row(const Storage* row, int columns) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float of_warps[32];
  const int team = static_cast<int>(threadIdx.x) / kThreads;
  const auto wait_for_team = [&] {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(kThreads) : "memory");
  };
  float amax = 0;
  for (int column = static_cast<int>(threadIdx.x) % kThreads * kColumns; column < columns;
       column += kThreads * kColumns) {
    RawColumns<Storage, kAligned> raw;
    raw.load(row, column, columns);
    UnitValues values;
    raw.values(values);
    amax = fmaxf(amax, amax_of_values(values));
  }
  amax = amax_of_lanes<32>(amax);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = amax;
  wait_for_team();
  for (int warp = 0; warp < kWarps; ++warp) amax = fmaxf(amax, of_warps[team * kWarps + warp]);
  wait_for_team();  // the next row's are written when all have read
  return amax;
}

/// E2M1 codes, in the first word.
__device__ __forceinline__ uint2 e2m1_codes(const UnitValues& values) {
  std::uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    packed |=
        static_cast<std::uint32_t>(core::e2m1_code(values[i].x) | core::e2m1_code(values[i].y) << 4)
        << 8 * i;
  }
  return {packed, 0};
}

/// The codes of 8 columns and their scale.
struct Coded {
  uint2 codes;
  float scale;
  int scale_code;  // E8M0
};

/// By whole warps. `row_amax`: with a scale for each row.
template <typename Storage>
__device__ __forceinline__ Coded encode(const CodeFormat& format, UnitValues& values,
                                        float row_amax) {
  using Scale = CodeFormat::Scale;
  if (format.scale == Scale::kStatic) {
    return {multiply_to_fp8(values, tensor_factor(format.static_scale)), 0, 0};
  }
  if (format.scale == Scale::kMx) {
    const MxScale block =
        mx_scale(amax_of_lanes<kMxLanes>(amax_of_values(values)), format.e2m1, format.rule);
    transform_values(values,
                     [&](float value) { return scaled(value, block.factor, block.is_zero); });
    return {format.e2m1 ? e2m1_codes(values) : round_to_fp8(values), block.scale, block.code};
  }
  const float scale =
      format.scale == Scale::kRow
          ? core::e4m3_row_scale(row_amax)
          : core::e4m3_group_scale(amax_of_lanes<kGroupLanes>(amax_of_values(values)), format.e8m0);
  Coded result{{}, scale, core::e8m0_code(scale)};
  if constexpr (sizeof(Storage) == 2) {
    result.codes = divide_to_fp8(values, scale, 1.0F / scale);
  } else {  // more bits than divide_to_fp8() takes
    transform_values(values, [&](float value) { return value / scale; });
    result.codes = round_to_fp8(values);
  }
  return result;
}

/// Without rows, too: those that arrive from other ranks have it.
__device__ __forceinline__ void write_static_scale(const QuantizeParams& p) {
  if (p.format.scale != CodeFormat::Scale::kStatic) return;
  *static_cast<float*>(p.scales) = p.format.static_scale;
}

/// By a team of a block: kThreads neighbours. Reads before it asks whether the row is wanted; else
/// nothing is written.
template <typename Storage, bool kAligned, int kThreads, typename IsWanted>
__device__ __forceinline__ void quantize_row(const QuantizeParams& p, std::int64_t row,
                                             const IsWanted& is_wanted) {
  using Scale = CodeFormat::Scale;
  // A thread reads so many times 8 columns together: more need more registers than it has.
  constexpr int kBatch = 2, kStep = kThreads * kColumns;
  const int columns = static_cast<int>(p.columns);
  const auto* x = static_cast<const Storage*>(p.x) + row * p.stride;
  const bool whole = p.format.scale == Scale::kRow || p.format.scale == Scale::kStatic;
  const float row_amax =
      p.format.scale == Scale::kRow ? amax_of_row<Storage, kAligned, kThreads>(x, columns) : 0.0F;
  std::uint8_t* const codes = p.codes + row * (p.format.e2m1 ? p.columns / 2 : p.columns);
  const int of_thread = static_cast<int>(threadIdx.x) % kThreads * kColumns;
  for (int first = 0; first < columns; first += kBatch * kStep) {
    RawColumns<Storage, kAligned> raw[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) raw[b].load(x, first + b * kStep + of_thread, columns);
    if (!is_wanted()) return;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      // Whole warps go on: lanes behind the end of the row take part in the maxima.
      if (first + b * kStep >= columns) break;
      UnitValues values;
      raw[b].values(values);
      const Coded coded = encode<Storage>(p.format, values, row_amax);
      const int column = first + b * kStep + of_thread;
      if (column >= columns) continue;
      if (p.format.e2m1) {
        *reinterpret_cast<std::uint32_t*>(codes + column / 2) = coded.codes.x;
      } else {
        *reinterpret_cast<uint2*>(codes + column) = coded.codes;
      }
      if (p.format.scale == Scale::kStatic) continue;
      const int unit = column / kColumns;
      if (whole ? unit != 0 : unit % p.format.group_lanes != 0) continue;
      const std::int64_t index = row * p.scales_of_row + (whole ? 0 : unit / p.format.group_lanes);
      if (p.format.e8m0) {
        static_cast<std::uint8_t*>(p.scales)[index] = static_cast<std::uint8_t>(coded.scale_code);
      } else {
        static_cast<float*>(p.scales)[index] = coded.scale;
      }
    }
  }
}

}  // namespace fusedmoe::cuda
