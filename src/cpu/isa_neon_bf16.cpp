// Kernels for 64-bit ARM with BFDOT, which adds two bf16 products per lane to an fp32 accumulator.
#include "cpu/kernels/dot_bf16.h"
#include "cpu/kernels/simd_neon.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : Neon {
  static constexpr Tuning kTuning{
      .rows = 6,  // 24 accumulators, 4 weights, 1 of a row of 32
      .vectors = 4,
      .totals = true,
      .f32_totals = true,
      .strips = {8, 8, 4}  // leave room for decoding
  };
};

struct Bfdot {
  using B = Simd::I;
  static Simd::F dot(Simd::F acc, B b, B a) {
    return (Simd::F)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)b, (bfloat16x8_t)a);
  }
  static void store(std::uint16_t* codes, Simd::F value) { Simd::to_bf16(codes, value); }
};

Kernels make_kernels() {
  using D = DotBf16<Simd, Bfdot>;
  using E2m1 = NibblePairs<Simd, Codes::kE2M1>;
  Kernels table = neon_i8mm_kernels();
  table.name = "neon_bf16";
  constexpr int kBF16 = static_cast<int>(Compute::kBF16);
  const auto set = [&](Codes codes, void (*multiply)(const TileJob&)) {
    table.multiply[static_cast<int>(codes)][kBF16] = multiply;
  };
  set(Codes::kBF16, multiply_plain<D, Bf16AsIs<Simd>, Undecoded>);
  set(Codes::kMxfp4, multiply_chained<D, E2m1, ScaledPanels<D, PairsToF32<Simd, E2m1>>>);
  set(Codes::kE2M1, multiply_codes<D, E2m1>);
  set(Codes::kInt4, multiply_codes<D, NibblePairs<Simd, Codes::kInt4>>);
  set(Codes::kE4M3, multiply_codes<D, E4m3Pairs<Simd>>);
  set(Codes::kInt8, multiply_codes<D, F32ToPairs<Simd, Int8Codec<Simd>>>);
  set(Codes::kW4A8, multiply_plain<D, F32ToPairs<Simd, W4A8Codec<Simd>>>);
  table.convert[kBF16] = convert_to_bf16;
  table.flops[kBF16] = flops<D>;
  return table;
}

}  // namespace

const Kernels& neon_bf16_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
