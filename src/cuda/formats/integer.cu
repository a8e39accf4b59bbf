// Packs and unpacks integer weights, and makes the FormatKernels of each policy of integer.cuh.
#include "cuda/formats/integer.cuh"

#include <algorithm>
#include <array>
#include <cmath>

#include "cuda/formats/pack_decoded.cuh"
#include "cuda/rows/element.cuh"

namespace fusedmoe::cuda {
namespace {

/// Scales rounded to the activations' type, as vLLM casts them, and bytes of zero points.
template <typename Operands>
struct IntegerScales {
  using Element = typename Operands::Activation;
  static constexpr DType kDType = ElementTraits<Element>::kDType;

  __device__ static float scale_at(const PackSource& s, std::int64_t row, std::int64_t k) {
    const std::int64_t i = s.scale_index(row, k);
    switch (s.scale_dtype) {
      case DType::kBF16:
        return to_f32(static_cast<const __nv_bfloat16*>(s.scales)[i]);
      case DType::kF16:
        return to_f32(static_cast<const __half*>(s.scales)[i]);
      default:
        return static_cast<const float*>(s.scales)[i];
    }
  }
  __device__ static std::uint8_t zero_point_at(const PackSource& s, std::int64_t row,
                                               std::int64_t k) {
    return s.zero_points ? s.zero_points[s.scale_index(row, k)]
                         : static_cast<std::uint8_t>(s.zero_point);
  }
  /// Times a power of two.
  FUSEDMOE_HD static Element shifted(Element scale, int exponent) {
    if constexpr (Operands::kScaleExponent == 0) {
      return scale;
    } else {
      return __float2bfloat16_rn(ldexpf(__bfloat162float(scale), exponent));
    }
  }
  /// Padding is zero: in rows by its scale, in columns by the code.
  __device__ static std::uint32_t code(const PackSource& s, std::int64_t row, std::int64_t k,
                                       std::uint32_t code, bool inside) {
    if (inside || row < 0) return code;
    // The zero point of the group that k is in, which begins inside, or 0 (see store()).
    const std::int64_t first = k - k % Operands::kGroupK;
    return first < s.k ? zero_point_at(s, row, first) : 0;
  }
  FUSEDMOE_HD static int place(const RowInBlock& row, int group) {
    return row.pair() * 2 * Operands::kGroups + group * 2 + row.half;
  }
  __device__ static void store(const PackSource& s, std::int64_t row, std::int64_t k, bool inside,
                               std::uint8_t* area, const RowInBlock& to, int group) {
    const int at = place(to, group);
    const auto scale = from_f32<Element>(inside ? scale_at(s, row, k) : 0.0F);
    reinterpret_cast<Element*>(area)[at] =
        shifted(scale, Operands::kScaleExponent - s.exponent_shift);
    if constexpr (Operands::kHasZeroPoints) {
      area[128 * Operands::kGroups + at] = inside ? zero_point_at(s, row, k) : 0;
    }
  }
  static void load(const PackedView& source, const std::byte* area, const RowInBlock& row,
                   int group, std::int64_t scale, const UnpackedRow& target) {
    const int at = place(row, group);
    Element packed;
    std::memcpy(&packed, area + 2 * at, sizeof(packed));
    packed = shifted(packed, source.exponent_shift - Operands::kScaleExponent);
    std::memcpy(static_cast<std::byte*>(target.scales) + 2 * scale, &packed, sizeof(packed));
    if (target.zero_points) {
      target.zero_points[scale] = static_cast<std::uint8_t>(area[128 * Operands::kGroups + at]);
    }
  }
};

/// The largest scale, which rounding may double, becomes a multiplier of at most 2^127.
int exponent_shift(const WeightMatrix& gate, const WeightMatrix* up) {
  float largest = 0;
  for (const WeightMatrix* matrix : {&gate, up}) {
    if (!matrix) continue;
    const TensorView& scales = matrix->scales;
    for (std::int64_t row = 0; row < scales.size(0); ++row) {
      for (std::int64_t group = 0; group < scales.size(1); ++group) {
        const std::int64_t at = row * scales.stride(0) + group * scales.stride(1);
        const float scale = std::fabs(load_f32(scales.data(), scales.dtype(), at));
        if (std::isfinite(scale)) largest = std::max(largest, scale);
      }
    }
  }
  constexpr int kMost = 127;
  return largest > 0 ? Int4SymmetricOperands::kScaleExponent + 1 + std::ilogb(largest) - kMost : 0;
}

template <typename Operands>
FormatKernels with_zeros() {
  return decoded_kernels<Operands, IntegerScales<Operands>>();
}

template <typename Operands>
FormatKernels symmetric() {
  FormatKernels kernels = with_zeros<Operands>();
  kernels.exponent_shift = exponent_shift;
  return kernels;
}

}  // namespace

std::span<const FormatKernels> integer_kernels() {
  static const std::array kAll = {
      symmetric<Int4SymmetricOperands>(), symmetric<Int4G32SymmetricOperands>(),
      with_zeros<Int4Bf16Operands>(),     with_zeros<Int4F16Operands>(),
      with_zeros<Int4G32Bf16Operands>(),  with_zeros<Int4G32F16Operands>(),
      with_zeros<Int8Bf16Operands>(),     with_zeros<Int8F16Operands>()};
  return kAll;
}

}  // namespace fusedmoe::cuda
