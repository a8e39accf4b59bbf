#include "cuda/rows/quantize_rows.h"

#include <algorithm>

#include "core/check.h"
#include "cuda/device/launch.h"
#include "cuda/rows/element.cuh"
#include "cuda/rows/gather_rows.cuh"
#include "cuda/rows/row_transform.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 8;  // of a thread at a time
constexpr int kMxLanes = 32 / kColumns;

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

CodeFormat format_of(const QuantKey& key, std::optional<float> static_scale) {
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

struct DequantizeParams {
  CodeFormat format;
  const std::uint8_t* codes;
  const void* scales;
  std::int64_t scales_of_row;
  std::int64_t columns;
  std::int64_t row_bytes;  // from one row's codes to the next one's
  void* out;
};

/// Zeros behind the end of the row.
template <typename Storage, bool kAligned>
__device__ void load_columns(const Storage* row, std::int64_t column, std::int64_t columns,
                             UnitValues& values) {
  constexpr int kWidth = kAligned ? 16 / static_cast<int>(sizeof(Storage)) : 1;
#pragma unroll
  for (int first = 0; first < kColumns; first += kWidth) {
    Pack<Storage, kWidth> pack{};
    if (column < columns) pack = Pack<Storage, kWidth>::load(row + column + first);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float2& pair = values[(first + i) / 2];
      ((first + i) % 2 == 0 ? pair.x : pair.y) = to_f32(pack.values[i]);
    }
  }
}

template <typename Storage, bool kAligned>
__device__ float amax_of_row(const Storage* row, std::int64_t columns) {
  __shared__ float of_warps[kThreads / 32];
  float amax = 0;
  UnitValues values;
  for (std::int64_t column = threadIdx.x * kColumns; column < columns;
       column += kThreads * kColumns) {
    load_columns<Storage, kAligned>(row, column, columns, values);
    amax = fmaxf(amax, amax_of_values(values));
  }
  amax = amax_of_lanes<32>(amax);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = amax;
  __syncthreads();
  for (const float of_warp : of_warps) amax = fmaxf(amax, of_warp);
  return amax;
}

/// E2M1 codes, in the first word.
__device__ uint2 e2m1_codes(const UnitValues& values) {
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
__device__ Coded encode(const CodeFormat& format, UnitValues& values, float row_amax) {
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

/// A block for each row; its threads have 8 neighbouring columns at a time.
template <typename Storage, bool kAligned>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const QuantizeParams p) {
  order_after_previous();
  using Scale = CodeFormat::Scale;
  const std::int64_t row = blockIdx.x;
  if (p.format.scale == Scale::kStatic && row == 0 && threadIdx.x == 0) {
    *static_cast<float*>(p.scales) = p.format.static_scale;
  }
  if (row >= p.rows) return;
  const auto* x = static_cast<const Storage*>(p.x) + row * p.stride;
  const bool whole = p.format.scale == Scale::kRow || p.format.scale == Scale::kStatic;
  const float row_amax =
      p.format.scale == Scale::kRow ? amax_of_row<Storage, kAligned>(x, p.columns) : 0.0F;
  const std::int64_t row_bytes = p.format.e2m1 ? p.columns / 2 : p.columns;
  // Whole warps go around together: lanes behind the end of the row take part in the maxima.
  for (std::int64_t first = 0; first < p.columns; first += kThreads * kColumns) {
    const std::int64_t column = first + threadIdx.x * kColumns;
    UnitValues values;
    load_columns<Storage, kAligned>(x, column, p.columns, values);
    const Coded coded = encode<Storage>(p.format, values, row_amax);
    if (column >= p.columns) continue;
    std::uint8_t* codes = p.codes + row * row_bytes;
    if (p.format.e2m1) {
      *reinterpret_cast<std::uint32_t*>(codes + column / 2) = coded.codes.x;
    } else {
      *reinterpret_cast<uint2*>(codes + column) = coded.codes;
    }
    if (p.format.scale == Scale::kStatic) continue;
    const std::int64_t unit = column / kColumns;
    if (whole ? unit != 0 : unit % p.format.group_lanes != 0) continue;
    const std::int64_t index = row * p.scales_of_row + (whole ? 0 : unit / p.format.group_lanes);
    if (p.format.e8m0) {
      static_cast<std::uint8_t*>(p.scales)[index] = static_cast<std::uint8_t>(coded.scale_code);
    } else {
      static_cast<float*>(p.scales)[index] = coded.scale;
    }
  }
}

/// f16 saturates, NaN stays.
template <typename Storage>
__device__ Storage rounded(float value) {
  constexpr float kF16Max = 65504;
  if constexpr (std::is_same_v<Storage, __half>) {
    value = value > kF16Max ? kF16Max : value < -kF16Max ? -kF16Max : value;
  }
  return from_f32<Storage>(value);
}

__device__ float scale_of(const DequantizeParams& p, std::int64_t row, std::int64_t column) {
  using Scale = CodeFormat::Scale;
  const bool grouped = p.format.scale == Scale::kGroup || p.format.scale == Scale::kMx;
  std::int64_t index = row * p.scales_of_row;
  if (grouped) index += column / kColumns / p.format.group_lanes;
  if (p.format.scale == Scale::kStatic) index = 0;
  return p.format.e8m0 ? core::e8m0_value(static_cast<const std::uint8_t*>(p.scales)[index])
                       : static_cast<const float*>(p.scales)[index];
}

/// The codes of 8 columns.
__device__ std::uint64_t codes_of(const DequantizeParams& p, std::int64_t row,
                                  std::int64_t column) {
  const std::uint8_t* codes = p.codes + row * p.row_bytes;
  if (p.format.e2m1) return *reinterpret_cast<const std::uint32_t*>(codes + column / 2);
  return *reinterpret_cast<const std::uint64_t*>(codes + column);
}

/// What they stand for, in 16 bytes at a time.
template <typename Storage>
struct Decoded {
  static constexpr int kWidth = 16 / static_cast<int>(sizeof(Storage));
  Pack<Storage, kWidth> packs[kColumns / kWidth];

  __device__ Decoded(const CodeFormat& format, std::uint64_t packed, float scale) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const auto code = static_cast<std::uint32_t>(packed >> i * (format.e2m1 ? 4 : 8));
      const float value = format.e2m1 ? core::e2m1_value(code & 0xF) : e4m3_value(code);
      packs[i / kWidth].values[i % kWidth] = rounded<Storage>(__fmul_rn(value, scale));
    }
  }
  __device__ void store(Storage* to) const {
#pragma unroll
    for (int i = 0; i < kColumns / kWidth; ++i) packs[i].store(to + i * kWidth);
  }
};

template <typename Storage>
__global__ void __launch_bounds__(kThreads) dequantize_rows_kernel(const DequantizeParams p) {
  order_after_previous();
  const std::int64_t row = blockIdx.x;
  for (std::int64_t column = threadIdx.x * kColumns; column < p.columns;
       column += kThreads * kColumns) {
    const Decoded<Storage> values(p.format, codes_of(p, row, column), scale_of(p, row, column));
    values.store(static_cast<Storage*>(p.out) + row * p.columns + column);
  }
}

struct PermuteParams {
  DequantizeParams from;
  const std::int32_t* slot_to_row;
  int topk;
  bool fp8_as_f16;
  char* to;
  std::int64_t to_pitch;
  float* to_scales;
  std::int64_t scale_pitch;
};

/// Row `index` of `from` to the rows of the token's slots, by so many threads. `Storage` is that of
/// decoded values, or a byte where codes stay.
template <typename Storage>
__device__ __forceinline__ void codes_to_slots(const PermuteParams& p, const DequantizeParams& from,
                                               std::int64_t index, std::int64_t token, int thread,
                                               int threads) {
  constexpr bool kDecodes = sizeof(Storage) > 1;
  const std::int32_t* rows = p.slot_to_row + token * p.topk;
  for (std::int64_t column = thread * kColumns; column < from.columns;
       column += threads * kColumns) {
    const std::uint64_t codes = codes_of(from, index, column);
    const float scale = from.scales ? scale_of(from, index, column) : 1.0F;
    if constexpr (kDecodes) {
      const Decoded<Storage> values(from.format, codes, scale);
      for (int j = 0; j < p.topk; ++j) {
        if (rows[j] < 0) continue;
        values.store(reinterpret_cast<Storage*>(p.to + rows[j] * p.to_pitch) + column);
      }
    } else {
      const std::int64_t unit = column / kColumns;
      const bool of_groups = p.scale_pitch > 0;
      const bool has_scale =
          p.to_scales && unit % (of_groups ? from.format.group_lanes : from.columns) == 0;
      const std::int64_t group = of_groups ? unit / from.format.group_lanes : 0;
      for (int j = 0; j < p.topk; ++j) {
        if (rows[j] < 0) continue;
        char* to = p.to + rows[j] * p.to_pitch;
        if (p.fp8_as_f16) {
          write_fp8_as_f16(to, static_cast<int>(unit), static_cast<int>(from.columns / kColumns),
                           reinterpret_cast<const uint2&>(codes));
        } else {
          *reinterpret_cast<std::uint64_t*>(to + column) = codes;
        }
        if (has_scale) p.to_scales[group * p.scale_pitch + rows[j]] = scale;
      }
    }
  }
}

/// A block for each token.
template <typename Storage>
__global__ void __launch_bounds__(kThreads) permute_codes_kernel(const PermuteParams p) {
  order_after_previous();
  codes_to_slots<Storage>(p, p.from, blockIdx.x, blockIdx.x, static_cast<int>(threadIdx.x),
                          kThreads);
}

/// By a warp: number g of a row's scales, scale(g), to those of the rows of a token's slots.
template <typename Scale>
__device__ __forceinline__ void scales_to_slots(const Scale& scale, int count, float* to,
                                                std::int64_t pitch, const std::int32_t* rows,
                                                int topk) {
  for (int g = static_cast<int>(threadIdx.x % 32); g < count; g += 32) {
    const float value = scale(g);
    for (int j = 0; j < topk; ++j) {
      if (rows[j] >= 0) to[g * pitch + rows[j]] = value;
    }
  }
}

/// For gather_rows_kernel().
template <typename Storage>
struct CodesToSlots {
  PermuteParams p;

  __device__ int operator()(char* values, char* scales, std::int64_t token) const {
    DequantizeParams from = p.from;
    from.codes = reinterpret_cast<const std::uint8_t*>(values);
    if (from.scales) from.scales = scales;
    if (sizeof(Storage) > 1 || from.columns % 16 != 0) {
      codes_to_slots<Storage>(p, from, 0, token, static_cast<int>(threadIdx.x % 32), 32);
      return 0;
    }
    if (p.to_scales) {
      const int columns =
          p.scale_pitch > 0 ? kColumns * from.format.group_lanes : static_cast<int>(from.columns);
      const auto scale = [&](int g) {
        return from.scales ? scale_of(from, 0, std::int64_t{g} * columns) : 1.0F;
      };
      scales_to_slots(scale, (static_cast<int>(from.columns) + columns - 1) / columns, p.to_scales,
                      p.scale_pitch, p.slot_to_row + token * p.topk, p.topk);
    }
    return static_cast<int>(from.columns);
  }
};

DequantizeParams params_of(const core::QuantizedViews& in, const QuantKey& key,
                           std::int64_t columns) {
  DequantizeParams params{};
  params.format = format_of(key, {});
  params.codes = in.values.as<const std::uint8_t>();
  params.scales = in.scales.data();
  params.scales_of_row = core::scales_per_row(key, columns);
  params.columns = columns;
  params.row_bytes = bytes(in.values.dtype(), in.values.stride(0));
  const std::int64_t read = params.format.e2m1 ? 4 : 8;  // bytes at a time
  FUSEDMOE_CHECK(params.row_bytes % read == 0 || in.values.size(0) < 2, "hidden_states",
                 "rows " + core::to_string(params.row_bytes) + " bytes apart",
                 "rows of codes a multiple of " + core::to_string(read) + " bytes apart");
  return params;
}

PermuteParams permute_params(const CodedRows& rows, const QuantKey& key, std::int64_t columns) {
  return {params_of(rows.from, key, columns),
          rows.slot_to_row,
          static_cast<int>(rows.topk),
          rows.fp8_as_f16,
          static_cast<char*>(rows.to),
          rows.to_pitch,
          rows.to_scales,
          rows.scale_pitch};
}
/// function(Storage{}) of codes_to_slots().
template <typename Function>
void with_storage(DType to, const Function& function) {
  if (to == DType::kE4M3) return function(std::uint8_t{});
  if (to == DType::kF16) return function(__half{});
  function(__nv_bfloat16{});
}

}  // namespace

void quantize_rows(const TensorView& x, const QuantKey& key, std::optional<float> scale,
                   const core::QuantizedViews& out, Stream stream) {
  const std::int64_t rows = x.size(0), columns = x.size(1);
  if (scale && key.dynamic) throw Error::conflict("scale", "a dynamic key");
  if (!scale && !key.dynamic) {
    throw Error::invalid("scale", "scale is missing: static keys need one");
  }
  FUSEDMOE_CHECK(columns % kColumns == 0, "columns", core::to_string(columns),
                 "a multiple of 8 on cuda");
  QuantizeParams params{};
  params.format = format_of(key, scale);
  params.x = x.data();
  params.rows = rows;
  params.stride = x.stride(0);
  params.columns = columns;
  params.codes = out.values.as<std::uint8_t>();
  params.scales = out.scales.data();
  params.scales_of_row = core::scales_per_row(key, columns);
  // A static scale is written without rows, too: those that arrive from other ranks have it.
  const std::int64_t blocks =
      params.format.scale == CodeFormat::Scale::kStatic ? std::max<std::int64_t>(rows, 1) : rows;
  if (blocks == 0) return;
  dispatch_storage(x.dtype(), [&](auto element) {
    using Storage = decltype(element);
    const auto* data = x.as<const Storage>();
    dispatch_width<Storage>(
        columns,
        [&](auto width) {
          launch(quantize_rows_kernel<Storage, (decltype(width)::value > 1)>,
                 dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, false, params);
        },
        data, data + x.stride(0));
  });
}

void dequantize_rows(const core::QuantizedViews& in, const QuantKey& key, const TensorView& out,
                     Stream stream) {
  const std::int64_t rows = out.size(0);
  if (rows == 0) return;
  DequantizeParams params = params_of(in, key, out.size(1));
  params.out = out.data();
  dispatch_storage(out.dtype(), [&](auto element) {
    launch(dequantize_rows_kernel<decltype(element)>, dim3(static_cast<unsigned>(rows)), kThreads,
           0, stream, false, params);
  });
}

void permute_codes(const CodedRows& rows, const QuantKey& key, std::int64_t columns,
                   Stream stream) {
  const std::int64_t num_tokens = rows.from.values.size(0);
  if (num_tokens == 0) return;
  const PermuteParams params = permute_params(rows, key, columns);
  with_storage(rows.to_dtype, [&](auto storage) {
    launch(permute_codes_kernel<decltype(storage)>, dim3(static_cast<unsigned>(num_tokens)),
           kThreads, 0, stream, true, params);
  });
}

RowArrivals gather_codes(const CodedRows& rows, const QuantKey& key, std::int64_t columns,
                         const GatheredRows& from, const Stream& stream) {
  const PermuteParams params = permute_params(rows, key, columns);
  RowArrivals arrivals;
  with_storage(rows.to_dtype, [&](auto storage) {
    arrivals = launch_gather(CodesToSlots<decltype(storage)>{params}, from, rows.topk, rows.to,
                             rows.to_pitch, stream);
  });
  return arrivals;
}

}  // namespace fusedmoe::cuda
