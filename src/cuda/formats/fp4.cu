// Packs and unpacks FP4 weights, and makes the FormatKernels of each policy of fp4.cuh.
#include "cuda/formats/fp4.cuh"

#include <array>

#include "cuda/formats/e8m0_scales.cuh"
#include "quant/quantize_scales.h"

namespace fusedmoe::cuda {
namespace {

/// E4M3 scales without a sign: normalized, so that subnormals need no care. Byte
/// (exponent + 10) << 3 | mantissa; 0 is 0.
struct Nvfp4Scales {
  static constexpr DType kDType = DType::kE4M3;

  __device__ static std::uint8_t scale_at(const PackSource& s, std::int64_t row, std::int64_t k) {
    return static_cast<const std::uint8_t*>(s.scales)[s.scale_index(row, k)] & 0x7F;
  }
  __device__ static std::uint32_t code(const PackSource& s, std::int64_t row, std::int64_t k,
                                       std::uint32_t code, bool inside) {
    return inside && scale_at(s, row, k) != 0 ? code : 0;
  }
  FUSEDMOE_HD static int place(const RowInBlock& row, int group) {
    return row.pair() * 8 + group * 2 + row.half;
  }
  /// Exponents: of normal scales field - 7, of m * 2^-9 that of the leading bit of m.
  __device__ static std::uint8_t normalized(std::uint8_t scale) {
    if (scale == 0) return 0;
    if (scale >= 8) return static_cast<std::uint8_t>(scale + (3 << 3));
    const int leading = scale >= 4 ? 2 : scale >= 2 ? 1 : 0;
    return static_cast<std::uint8_t>((leading + 1) << 3 | (scale << (3 - leading) & 7));
  }
  static std::uint8_t published(std::uint8_t byte) {
    if (byte == 0) return 0;
    const int exponent = (byte >> 3) - 10;
    if (exponent >= -6) return static_cast<std::uint8_t>(byte - (3 << 3));
    return static_cast<std::uint8_t>((8 | (byte & 7)) >> (-6 - exponent));
  }
  __device__ static void store(const PackSource& s, std::int64_t row, std::int64_t k, bool inside,
                               std::uint8_t* area, const RowInBlock& to, int group) {
    area[place(to, group)] = inside ? normalized(scale_at(s, row, k)) : 0;
  }
  static void load(const PackedView&, const std::byte* area, const RowInBlock& row, int group,
                   std::int64_t scale, const UnpackedRow& target) {
    static_cast<std::uint8_t*>(target.scales)[scale] =
        published(static_cast<std::uint8_t>(area[place(row, group)]));
  }
};

void check_not_negative(const WeightMatrix& gate, const WeightMatrix* up) {
  for (const WeightMatrix* matrix : {&gate, up}) {
    if (matrix && range_of(matrix->scales).second >= 0x80) {
      throw Error::unsupported(Reason::kQuantScheme, "weights.scales", "negative",
                               "at least 0: block scales have no sign");
    }
  }
}

template <typename Operands>
FormatKernels mxfp4_kernels() {
  FormatKernels kernels = decoded_kernels<Operands, E8m0Scales<Operands>>();
  kernels.exponent_shift = Operands::kIsBf16 ? exponent_shift_bf16<Operands> : exponent_shift_f16;
  return kernels;
}
template <typename Operands>
FormatKernels nvfp4_kernels() {
  FormatKernels kernels = decoded_kernels<Operands, Nvfp4Scales>();
  kernels.check_scales = check_not_negative;
  return kernels;
}

}  // namespace

std::span<const FormatKernels> fp4_kernels() {
  static const std::array kAll = {
      mxfp4_kernels<Mxfp4Bf16Operands>(), mxfp4_kernels<Mxfp4QuantizedOperands>(),
      mxfp4_kernels<Mxfp4F16Operands>(), nvfp4_kernels<Nvfp4Bf16Operands>(),
      nvfp4_kernels<Nvfp4F16Operands>()};
  return kAll;
}

}  // namespace fusedmoe::cuda
