#include "cuda/rows/quantize_rows.h"

#include <algorithm>

#include "core/check.h"
#include "cuda/device/launch.h"
#include "cuda/rows/gather_rows.cuh"
#include "cuda/rows/quantize_row.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 128;

struct DequantizeParams {
  CodeFormat format;
  const std::uint8_t* codes;
  const void* scales;
  std::int64_t scales_of_row;
  std::int64_t columns;
  std::int64_t row_bytes;  // from one row's codes to the next one's
  void* out;
};

/// A block for each row.
template <typename Storage, bool kAligned>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(const QuantizeParams p) {
  order_after_previous();
  if (blockIdx.x == 0 && threadIdx.x == 0) write_static_scale(p);
  if (blockIdx.x >= p.rows) return;
  quantize_row<Storage, kAligned, kThreads>(p, blockIdx.x, [] { return true; });
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
  const QuantizeParams params = quantize_params(x, key, scale, out);
  const std::int64_t blocks = std::max<std::int64_t>(x.size(0), key.dynamic ? 0 : 1);
  if (blocks == 0) return;
  with_rows_of(x, [&](auto element, auto is_aligned) {
    launch(quantize_rows_kernel<decltype(element), decltype(is_aligned)::value>,
           dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, false, params);
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
