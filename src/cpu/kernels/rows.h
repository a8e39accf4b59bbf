// Steps on whole rows, for an instruction-set policy S: the weighted sum of GEMM 2's rows, and the
// conversion of hidden states to what GEMM 1 reads. Included by isa_*.cpp only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "cpu/kernels.h"
#include "cpu/kernels/half.h"

namespace fusedmoe::cpu {
namespace {

/// Decodes a bf16 or f16 code.
inline float half_to_f32(std::uint16_t code, Epilogue::Rounding format) {
  if (format == Epilogue::Rounding::kF16) return load_half(code);
  const std::uint32_t bits = static_cast<std::uint32_t>(code) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <class S>
inline typename S::F round_to(typename S::F value, Epilogue::Rounding rounding) {
  alignas(64) std::uint16_t codes[S::kWidth];
  const auto* bytes = reinterpret_cast<const std::byte*>(codes);
  if (rounding == Epilogue::Rounding::kBF16) {
    S::to_bf16(codes, value);
    return S::load_bf16(bytes);
  }
  S::to_f16(codes, value);
  return S::load_f16(bytes);
}

// ------------------------------------------------------------------

/// Where sums are written: the output row, its dtype, and whether they are added to it.
struct SumTarget {
  void* output;
  Epilogue::Rounding dtype;
  bool accumulate;
};

/// What the output row has in a column.
inline float element_of(const SumTarget& target, std::int64_t column) {
  if (target.dtype == Epilogue::Rounding::kNone) {
    return static_cast<const float*>(target.output)[column];
  }
  return half_to_f32(static_cast<const std::uint16_t*>(target.output)[column], target.dtype);
}

/// The sums of `count` columns from column i on.
template <class S>
inline void write_sum(const SumTarget& target, typename S::F sum, std::int64_t i,
                      std::int64_t count) {
  alignas(64) float lanes[S::kWidth];
  alignas(64) std::uint16_t codes[S::kWidth];
  const auto size = static_cast<std::size_t>(count);
  if (target.accumulate) {
    S::store(lanes, S::set1(0.0f));
    for (std::size_t c = 0; c < size; ++c) {
      lanes[c] = element_of(target, i + static_cast<std::int64_t>(c));
    }
    sum = S::fma(sum, S::set1(1.0f), S::load(lanes));
  }
  const bool whole = count == S::kWidth;  // then to its place at once
  if (target.dtype == Epilogue::Rounding::kNone) {
    float* to = static_cast<float*>(target.output) + i;
    S::store(whole ? to : lanes, sum);
    if (!whole) std::memcpy(to, lanes, 4 * size);
    return;
  }
  std::uint16_t* to = static_cast<std::uint16_t*>(target.output) + i;
  if (target.dtype == Epilogue::Rounding::kBF16) {
    S::to_bf16(whole ? to : codes, sum);
  } else {
    S::to_f16(whole ? to : codes, sum);
  }
  if (!whole) std::memcpy(to, codes, 2 * size);
}

template <class S>
void reduce(const ReduceJob& job) {
  const SumTarget target{job.output, job.dtype, job.accumulate};
  for (std::int64_t i = job.begin; i < job.end; i += S::kWidth) {
    auto sum = S::set1(0.0f);
    for (std::int64_t j = 0; j < job.num_indices; ++j) {
      if (job.indices[j] < 0) continue;
      // Rows are padded to whole tiles, so a full vector may be read behind the last column.
      const auto row =
          S::load(reinterpret_cast<const float*>(job.rows + job.indices[j] * job.row_bytes) + i);
      sum = S::fma(row, S::set1(job.weights ? job.weights[j] : 1.0f), sum);
    }
    const std::int64_t left = job.end - i;
    write_sum<S>(target, sum, i, left < S::kWidth ? left : S::kWidth);
  }
}

template <class S, Epilogue::Rounding kDtype>
inline typename S::F load_columns(const std::byte* row, std::int64_t i) {
  if constexpr (kDtype == Epilogue::Rounding::kNone) {
    return S::load(reinterpret_cast<const float*>(row) + i);
  } else if constexpr (kDtype == Epilogue::Rounding::kBF16) {
    return S::load_bf16(row + 2 * i);
  } else {
    return S::load_f16(row + 2 * i);
  }
}

/// The same of the last `count` columns, the rest zeros: nothing behind the row is read.
template <class S, Epilogue::Rounding kDtype>
inline typename S::F load_last(const std::byte* row, std::int64_t i, std::int64_t count) {
  constexpr std::int64_t kBytes = kDtype == Epilogue::Rounding::kNone ? 4 : 2;
  alignas(64) std::byte lanes[S::kWidth * 4] = {};
  std::memcpy(lanes, row + i * kBytes, static_cast<std::size_t>(count * kBytes));
  return load_columns<S, kDtype>(lanes, 0);
}

/// Writes a line of 64 bytes past the caches, where the processor can; `to` is aligned.
inline void stream_line(std::byte* to, const std::byte* line) {
#ifdef __SSE2__
  for (int i = 0; i < 64; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(line + i)));
  }
#else
  std::memcpy(to, line, 64);
#endif
}

/// Other threads see streamed lines only behind this.
inline void fence_streams() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

template <class S, Epilogue::Rounding kDtype>
void sum_rows_of(const SumJob& job) {
  constexpr int kVectors = 4;  // whose sums hide each other's latency
  alignas(64) std::byte lines[kVectors * S::kWidth * 4];
  const std::int64_t target_bytes = job.dtype == Epilogue::Rounding::kNone ? 4 : 2;
  const bool stream = job.stream && !job.accumulate && kVectors * S::kWidth * 2 % 64 == 0 &&
                      reinterpret_cast<std::uintptr_t>(job.output) % 64 == 0;
  constexpr std::int64_t kLine = 64, kBytes = kDtype == Epilogue::Rounding::kNone ? 4 : 2;
  const SumTarget target{job.output, job.dtype, job.accumulate};
  const auto weight = [&](std::int64_t j) { return S::set1(job.weights ? job.weights[j] : 1.0f); };
  std::int64_t i = 0;
  for (; i + kVectors * S::kWidth <= job.columns; i += kVectors * S::kWidth) {
    typename S::F sums[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[v] = S::set1(0.0f);
    for (std::int64_t j = 0; j < job.num_rows; ++j) {
      if (!job.rows[j]) continue;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const auto row = load_columns<S, kDtype>(job.rows[j], i + v * S::kWidth);
        sums[v] = S::fma(row, weight(j), sums[v]);
      }
    }
    for (std::int64_t j = 0; job.next_rows && j < job.num_rows; ++j) {
      if (!job.next_rows[j]) continue;
      for (std::int64_t b = 0; b < kVectors * S::kWidth * kBytes; b += kLine) {
        __builtin_prefetch(job.next_rows[j] + i * kBytes + b, 0, 2);
      }
    }
    const SumTarget part{stream ? lines : static_cast<std::byte*>(job.output) + i * target_bytes,
                         job.dtype, job.accumulate};
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) write_sum<S>(part, sums[v], v * S::kWidth, S::kWidth);
    for (std::int64_t b = 0; stream && b < kVectors * S::kWidth * target_bytes; b += kLine) {
      stream_line(static_cast<std::byte*>(job.output) + i * target_bytes + b, lines + b);
    }
  }
  if (stream) fence_streams();
  for (; i < job.columns; i += S::kWidth) {
    const std::int64_t left = job.columns - i, count = left < S::kWidth ? left : S::kWidth;
    auto sum = S::set1(0.0f);
    for (std::int64_t j = 0; j < job.num_rows; ++j) {
      if (job.rows[j]) sum = S::fma(load_last<S, kDtype>(job.rows[j], i, count), weight(j), sum);
    }
    write_sum<S>(target, sum, i, count);
  }
}

template <class S>
void sum_rows(const SumJob& job) {
  switch (job.row_dtype) {
    case Epilogue::Rounding::kNone:
      return sum_rows_of<S, Epilogue::Rounding::kNone>(job);
    case Epilogue::Rounding::kBF16:
      return sum_rows_of<S, Epilogue::Rounding::kBF16>(job);
    case Epilogue::Rounding::kF16:
      return sum_rows_of<S, Epilogue::Rounding::kF16>(job);
  }
}

template <class S>
void convert_to_f32(const void* source, Epilogue::Rounding from, std::int64_t count,
                    std::int64_t padded, void* target) {
  auto* out = static_cast<float*>(target);
  const auto* in = static_cast<const std::byte*>(source);
  std::int64_t i = 0;
  if (from == Epilogue::Rounding::kNone) {
    std::memcpy(out, source, static_cast<std::size_t>(4 * count));
    i = count;
  }
  for (; i + S::kWidth <= count; i += S::kWidth) {
    S::store(out + i,
             from == Epilogue::Rounding::kF16 ? S::load_f16(in + 2 * i) : S::load_bf16(in + 2 * i));
  }
  for (; i < count; ++i) {
    std::uint16_t code;
    std::memcpy(&code, in + 2 * i, 2);
    out[i] = half_to_f32(code, from);
  }
  for (; i < padded; ++i) out[i] = 0;
}

/// Rows of a bf16 layer are bf16 already: only the padding is new.
inline void convert_to_bf16(const void* source, Epilogue::Rounding, std::int64_t count,
                            std::int64_t padded, void* target) {
  std::memcpy(target, source, static_cast<std::size_t>(2 * count));
  std::memset(static_cast<std::byte*>(target) + 2 * count, 0,
              static_cast<std::size_t>(2 * (padded - count)));
}

}  // namespace
}  // namespace fusedmoe::cpu
