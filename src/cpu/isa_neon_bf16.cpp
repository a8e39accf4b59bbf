// Kernels for 64-bit ARM with BFDOT, which adds two bf16 products per lane to an fp32 accumulator.
#include "cpu/dot_f32.h"
#include "cpu/simd_neon.h"

namespace fusedmoe::cpu {
namespace {

struct DotBf16 {
  using Simd = cpu::Simd;
  using B = Simd::I;
  static constexpr int kPerStep = 2;
  static constexpr int kStepsPerGroup = kGroup / 2;
  static constexpr int kRows = Simd::kRows;
  static constexpr int kPasses = kTileColumns / (Simd::kVectors * Simd::kWidth);
  static constexpr auto multiply_block = multiply_panel_rows<DotBf16>;

  static B load_b(const std::byte* p) { return Simd::load_words(p); }
  static void store_b(std::byte* p, B value) { Simd::store_words(p, value); }
  static B broadcast(const std::byte* p) {
    std::int32_t pair;
    std::memcpy(&pair, p, 4);
    return Simd::set1_words(pair);
  }
  static Simd::F dot(Simd::F acc, B b, B a) {
    return (Simd::F)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)b, (bfloat16x8_t)a);
  }

  using Acc = Simd::F;
  static Acc zero() { return Acc{}; }
  static Acc initial(Simd::F value) { return value; }
  static Simd::F to_float(Acc acc) { return acc; }
  static void store_element(std::byte* row, std::int64_t column, Simd::F value,
                            Epilogue::Rounding) {
    Simd::to_bf16(reinterpret_cast<std::uint16_t*>(row) + column, value);
  }
};

/// Weights that are bf16 pairs already.
struct Bf16AsIs {
  static constexpr int kK = 2, kSteps = 1;
  explicit Bf16AsIs(const TileFormat&) {}
  void decode(const std::byte* block, const std::byte*, int v, Simd::I (&steps)[kSteps]) const {
    steps[0] = Simd::load_words(block + 16 * v);
  }
};

Kernels make_kernels() {
  using D = DotBf16;
  using E2m1 = NibblePairs<Simd, Codes::kE2M1>;
  Kernels table = neon_i8mm_kernels();
  table.name = "neon_bf16";
  constexpr int kBF16 = static_cast<int>(Compute::kBF16);
  const auto set = [&](Codes codes, void (*multiply)(const TileJob&)) {
    table.multiply[static_cast<int>(codes)][kBF16] = multiply;
  };
  set(Codes::kBF16, multiply_plain<D, Bf16AsIs, Undecoded>);
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
