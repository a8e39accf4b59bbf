// What becomes of a row on its way to a GEMM: copied, quantized and decoded again, or quantized to
// FP8 or INT8.
#pragma once

#include <cfloat>
#include <cstdint>
#include <optional>

#include "core/host_device.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::cuda {

/// How rows are quantized, for formats whose values, up to a factor of the expert, are exact in
/// bf16: they are decoded again where they are made.
struct RowQuantizer {
  enum class Kind : std::uint8_t { kNone, kMxfp4, kMxfp8, kNvfp4 };
  Kind kind = Kind::kNone;
  MxScaleRule rule = MxScaleRule::kOcp;  ///< of MX
  const float* global_scales = nullptr;  ///< of NVFP4: (experts)
};

/// E4M3 codes and fp32 scales. Formulas: quant/quantize_scales.h.
struct Fp8Quantizer {
  /// What shares a scale.
  enum class Scale : std::uint8_t {
    kStatic,  ///< everything; the scale is known
    kTensor,  ///< everything; it follows from the largest value
    kRow,
    kGroup,  ///< 128 columns of a row
  };
  Scale scale = Scale::kRow;
  bool power_of_two = false;  ///< scales of groups
  float static_scale = 1;
  std::uint32_t* amax = nullptr;  ///< of the tensor: bits of the float
};
inline Fp8Quantizer fp8_quantizer(const QuantKey& key, std::optional<float> static_scale,
                                  std::uint32_t* amax) {
  using Scale = Fp8Quantizer::Scale;
  Fp8Quantizer quantizer;
  quantizer.scale = !key.dynamic         ? Scale::kStatic
                    : key.group.rows < 0 ? Scale::kTensor
                    : key.group.cols < 0 ? Scale::kRow
                                         : Scale::kGroup;
  quantizer.power_of_two = key.scale == DType::kE8M0;
  quantizer.static_scale = static_scale.value_or(1);
  quantizer.amax = amax;
  return quantizer;
}

/// What values are multiplied by whose scale the whole tensor has. Where all of them are zero or
/// tiny, the scale is so small that its inverse is infinite in fp32. Then all codes are to be zero.
FUSEDMOE_HD inline float tensor_factor(float scale) {
  const float inverse = 1.0F / scale;
  return inverse > FLT_MAX || inverse < -FLT_MAX ? 0 : inverse;
}

struct RowTransform {
  enum class Kind : std::uint8_t {  // from kFp8 on rows become codes, or what these stand for
    kCopy,
    kQuantizeAndDecode,  ///< bf16 -> bf16
    kFp8,                ///< bf16 or f16 -> E4M3
    kFp8AsF16,           ///< the same as the numbers that codes are, see e4m3_f16.cuh
    kInt8,               ///< bf16 or f16 -> INT8, each row with a scale
  };
  Kind kind = Kind::kCopy;
  const void* rows = nullptr;
  std::int64_t row_pitch = 0;  ///< bytes between rows
  std::int64_t row_bytes = 0;
  void* to = nullptr;  ///< null: nothing is written
  std::int64_t to_pitch = 0;
  // All but copies: addresses, pitches and row_bytes are multiples of 16 bytes.
  RowQuantizer decoded;
  Fp8Quantizer fp8;
  bool from_f16 = false;    ///< codes: rows are f16
  bool full_range = false;  ///< INT8: as QuantKey says
  float* scales = nullptr;  ///< of codes: (rows), or of groups (groups, scale_pitch), or null
  std::int64_t scale_pitch = 0;

  /// Rows become codes of a byte, or the numbers of such.
  FUSEDMOE_HD bool makes_codes() const { return kind >= Kind::kFp8; }
  /// Each row has one scale, which follows from its values.
  FUSEDMOE_HD bool has_row_scales() const {
    return makes_codes() && fp8.scale == Fp8Quantizer::Scale::kRow;
  }
  /// Rows of one token differ from expert to expert.
  FUSEDMOE_HD bool differ_by_expert() const { return decoded.global_scales != nullptr; }
};

}  // namespace fusedmoe::cuda
