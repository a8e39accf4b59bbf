// The multiply functions with fp32 dot products: what every level has, for every kind of weights.
// Included by isa_*.cpp only.
#pragma once

#include "cpu/kernels/stream.h"
#include "quant/quantize_row.h"

namespace fusedmoe::cpu {
namespace {

/// Weights without scales in the stream, or whose codec applies them. kMost: stream_few_rows.
template <Dot D, CodecOf<D> Codec, class Panels = CodecPanels<D, Codec>,
          std::int64_t kMost = kStreamedRows>
void multiply_plain(const TileJob& job) {
  if (!stream_few_rows<D, Codec, Scaling::kNone, kMost>(job)) multiply<D, Panels>(job);
}

/// Weights whose groups have scales in the stream.
template <Dot D, CodecOf<D> Codec, std::int64_t kMost = kStreamedRows>
void multiply_grouped(const TileJob& job) {
  if (!stream_few_rows<D, Codec, Scaling::kGroups, kMost>(job)) multiply_groups<D, Codec>(job);
}

/// The same, or one scale per column.
template <Dot D, CodecOf<D> Codec, std::int64_t kMost = kStreamedRows>
void multiply_codes(const TileJob& job) {
  job.format.scales == ScaleType::kNone
      ? multiply_plain<D, Codec, CodecPanels<D, Codec>, kMost>(job)
      : multiply_grouped<D, Codec, kMost>(job);
}

/// Integers of 4 or 8 bits, whose groups have scales in the stream. With few rows they may have
/// another codec than in panels; the results are the same.
template <Dot D, CodecOf<D> Codec, int kBits, std::int64_t kMost = kStreamedRows>
void multiply_integers(const TileJob& job) {
  using S = typename D::Simd;
  if constexpr (S::kTuning.converts_integers) {
    const bool done =
        job.format.zeros
            ? stream_few_rows<D, ConvertedIntegers<S, kBits, true>, Scaling::kGroups, kMost>(job)
            : stream_few_rows<D, ConvertedIntegers<S, kBits, false>, Scaling::kGroups, kMost>(job);
    if (!done) multiply_groups<D, Codec>(job);
  } else {
    multiply_codes<D, Codec, kMost>(job);
  }
}

/// Codes that become fp32 by the scales of their groups. `Few` is the codec of few rows that makes
/// a group's scales once and loads them for each step.
template <Dot D, CodecOf<D> Codec, CodecOf<D> Few>
void multiply_scaled(const TileJob& job) {
  using Stream = std::conditional_t<D::Simd::kTuning.keeps_scales, Few, Codec>;
  if (!stream_few_rows<D, Stream, Scaling::kNone>(job)) multiply<D, CodecPanels<D, Codec>>(job);
}

/// llama.cpp's blocks. With few rows, integer codes are converted to fp32 in registers; codes of
/// IQ4 are looked up in their table.
template <Dot D, Codes kCodes>
void multiply_blocks(const TileJob& job) {
  using S = typename D::Simd;
  using Codec = BlockCodec<S, kCodes>;
  if constexpr (block_codes(kCodes).elements == Codes::kIq4) {
    multiply_plain<D, Codec>(job);
  } else {
    multiply_scaled<D, Codec, BlockGroups<S, kCodes>>(job);
  }
}

/// MXFP4 with exact activations.
template <Dot D, CodecOf<D> Codec, class Panels>
void multiply_chained(const TileJob& job) {
  if (!stream_few_rows<D, Codec, Scaling::kChained>(job)) multiply<D, Panels>(job);
}

/// The table of a level with nothing but fp32 dot products.
template <class S>
Kernels f32_kernels(const char* name) {
  using D = DotF32<S>;
  using E2m1 = Nibbles<S, Codes::kE2M1>;
  constexpr std::int64_t kMost = S::kTuning.most_halves, kMostInt8 = S::kTuning.most_int8;
  Kernels table{};
  table.name = name;
  const auto set = [&](Codes codes, void (*multiply)(const TileJob&)) {
    table.multiply[static_cast<int>(codes)][static_cast<int>(Compute::kF32)] = multiply;
  };
  set(Codes::kF32, multiply_plain<D, F32Codec<S>, Undecoded>);
  set(Codes::kBF16, multiply_plain<D, Bf16Codec<S>, CodecPanels<D, Bf16Codec<S>>, kMost>);
  set(Codes::kF16, multiply_plain<D, F16Codec<S>, CodecPanels<D, F16Codec<S>>, kMost>);
  set(Codes::kMxfp4, multiply_chained<D, E2m1, ScaledPanels<D, E2m1>>);
  set(Codes::kE2M1, multiply_codes<D, E2m1>);
  set(Codes::kInt4, multiply_integers<D, Nibbles<S, Codes::kInt4>, 4>);
  set(Codes::kE4M3, multiply_codes<D, E4m3<S>>);
  set(Codes::kInt8, multiply_integers<D, Int8Codec<S>, 8, kMostInt8>);
  set(Codes::kW4A8, multiply_scaled<D, W4A8Codec<S>, W4A8Groups<S>>);
  set(Codes::kIq4, multiply_grouped<D, Nibbles<S, Codes::kIq4>>);
  set(Codes::kQ2K, multiply_blocks<D, Codes::kQ2K>);
  set(Codes::kQ3K, multiply_blocks<D, Codes::kQ3K>);
  set(Codes::kQ4K, multiply_blocks<D, Codes::kQ4K>);
  set(Codes::kQ5K, multiply_blocks<D, Codes::kQ5K>);
  set(Codes::kQ6K, multiply_blocks<D, Codes::kQ6K>);
  set(Codes::kQ41, multiply_blocks<D, Codes::kQ41>);
  set(Codes::kQ51, multiply_blocks<D, Codes::kQ51>);
  set(Codes::kIq4Xs, multiply_blocks<D, Codes::kIq4Xs>);
  table.reduce = reduce<S>;
  table.sum = sum_rows<S>;
  table.convert[static_cast<int>(Compute::kF32)] = convert_to_f32<S>;
  table.quantize_row = core::quantize_row_here;
  table.expand_codes = core::expand_codes;
  table.activate = activate_rows<S>;
  table.flops[static_cast<int>(Compute::kF32)] = flops<D>;
  return table;
}

}  // namespace
}  // namespace fusedmoe::cpu
