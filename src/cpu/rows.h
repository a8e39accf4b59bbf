// Steps on whole rows, for an instruction-set policy S: the weighted sum of GEMM 2's rows, and the
// conversion of hidden states to what GEMM 1 reads. Included by isa_*.cpp only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/half.h"
#include "cpu/kernels.h"

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

/// What the output row has in a column.
inline float element_of(const ReduceJob& job, std::int64_t column) {
  if (job.dtype == Epilogue::Rounding::kNone) return static_cast<const float*>(job.output)[column];
  return half_to_f32(static_cast<const std::uint16_t*>(job.output)[column], job.dtype);
}

template <class S>
void reduce(const ReduceJob& job) {
  for (std::int64_t i = job.begin; i < job.end; i += S::kWidth) {
    auto sum = S::set1(0.0f);
    for (std::int64_t j = 0; j < job.num_indices; ++j) {
      if (job.indices[j] < 0) continue;
      // Rows are padded to whole tiles, so a full vector may be read behind the last column.
      const auto row =
          S::load(reinterpret_cast<const float*>(job.rows + job.indices[j] * job.row_bytes) + i);
      sum = S::fma(row, S::set1(job.weights ? job.weights[j] : 1.0f), sum);
    }
    alignas(64) float lanes[S::kWidth];
    alignas(64) std::uint16_t codes[S::kWidth];
    const std::int64_t left = job.end - i;
    const auto count = static_cast<std::size_t>(left < S::kWidth ? left : S::kWidth);
    if (job.accumulate) {
      S::store(lanes, S::set1(0.0f));
      for (std::size_t c = 0; c < count; ++c) {
        lanes[c] = element_of(job, i + static_cast<std::int64_t>(c));
      }
      sum = S::fma(sum, S::set1(1.0f), S::load(lanes));
    }
    switch (job.dtype) {
      case Epilogue::Rounding::kNone:
        S::store(lanes, sum);
        std::memcpy(static_cast<float*>(job.output) + i, lanes, 4 * count);
        continue;
      case Epilogue::Rounding::kBF16:
        S::to_bf16(codes, sum);
        break;
      case Epilogue::Rounding::kF16:
        S::to_f16(codes, sum);
        break;
    }
    std::memcpy(static_cast<std::uint16_t*>(job.output) + i, codes, 2 * count);
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
