// Kernels for AVX-512 with BF16, VBMI and VNNI: vdpbf16ps adds two bf16 products per lane to an
// fp32 accumulator.
#include "cpu/kernels/bf16_avx512.h"

namespace fusedmoe::cpu {
namespace {

struct Simd : Avx512 {
  static constexpr Tuning kTuning{.rows = 6,  // 24 accumulators, 4 weights, 1 of a row of 32
                                  .vectors = 4,
                                  .totals = true,
                                  .side_by_side = 4,
                                  .strips = {4, 4, 4},
                                  .keeps_scales = false};
};

Kernels make_kernels() {
  using D = DotBf16<Simd, Bf16Products>;
  Kernels table = avx512_vnni_kernels();
  table.name = "avx512_bf16";
  constexpr int kBF16 = static_cast<int>(Compute::kBF16);
  const auto set = [&](Codes codes, void (*multiply)(const TileJob&)) {
    table.multiply[static_cast<int>(codes)][kBF16] = multiply;
  };
  set(Codes::kBF16, multiply_plain<D, Bf16AsIs<Simd>, Undecoded>);
  set(Codes::kMxfp4, multiply_chained<D, NibblesToBf16<Codes::kE2M1>, Mxfp4ToBf16>);
  set(Codes::kE2M1, multiply_codes<D, NibblesToBf16<Codes::kE2M1>>);
  set(Codes::kInt4, multiply_codes<D, NibblesToBf16<Codes::kInt4>>);
  set(Codes::kE4M3, multiply_codes<D, E4m3ToBf16>);
  set(Codes::kInt8, multiply_codes<D, Int8ToBf16>);
  set(Codes::kW4A8, multiply_plain<D, W4A8ToBf16>);
  table.convert[kBF16] = convert_to_bf16;
  table.flops[kBF16] = flops<D>;
  return table;
}

}  // namespace

const Kernels& avx512_bf16_kernels() {
  static const Kernels table = make_kernels();
  return table;
}

}  // namespace fusedmoe::cpu
