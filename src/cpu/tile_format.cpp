#include "cpu/tile_format.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.h"
#include "quant/quantize.h"

namespace fusedmoe::cpu {
namespace {

/// llama.cpp's blocks.
std::optional<Codes> codes_of_blocks(const QuantKey& key) {
  static const std::array<std::pair<QuantKey, Codes>, 8> kTable{{{keys::q2_k(), Codes::kQ2K},
                                                                 {keys::q3_k(), Codes::kQ3K},
                                                                 {keys::q4_k(), Codes::kQ4K},
                                                                 {keys::q5_k(), Codes::kQ5K},
                                                                 {keys::q6_k(), Codes::kQ6K},
                                                                 {keys::q4_1(), Codes::kQ41},
                                                                 {keys::q5_1(), Codes::kQ51},
                                                                 {keys::iq4_xs(), Codes::kIq4Xs}}};
  const auto found =
      std::find_if(kTable.begin(), kTable.end(), [&](const auto& row) { return row.first == key; });
  return found == kTable.end() ? std::nullopt : std::optional(found->second);
}

/// How tiles hold the key's elements; nothing if the CPU experts do not know the key.
std::optional<Codes> codes_of(const QuantKey& key) {
  if (key.global_group.cols > 0) return codes_of_blocks(key);
  switch (key.value) {
    case DType::kF32:
      return Codes::kF32;
    case DType::kBF16:
      return Codes::kBF16;
    case DType::kF16:
      return Codes::kF16;
    case DType::kE2M1:
      return key.scale == DType::kE8M0 ? Codes::kMxfp4 : Codes::kE2M1;
    case DType::kI4:
      return key.scale == DType::kE4M3 ? Codes::kW4A8 : Codes::kInt4;
    case DType::kIq4:
      return Codes::kIq4;
    case DType::kE4M3:
      return Codes::kE4M3;
    case DType::kU8:
    case DType::kI8:
      return Codes::kInt8;
    default:
      return std::nullopt;
  }
}

bool per_group(const QuantKey& key) {
  return key.group.cols > 0 && key.group.cols != -1;
}

/// The type of these scales; f32 if they differ.
ScaleType common_type(const std::vector<const WeightMatrix*>& matrices) {
  const DType dtype = matrices.empty() ? DType::kF32 : matrices.front()->scales.dtype();
  for (const WeightMatrix* matrix : matrices) {
    if (matrix->scales.dtype() != dtype) return ScaleType::kF32;
  }
  return dtype == DType::kF16    ? ScaleType::kF16
         : dtype == DType::kBF16 ? ScaleType::kBF16
                                 : ScaleType::kF32;
}

}  // namespace

bool has_column_scales(const QuantKey& key) {
  return key.quantized() &&
         ((!per_group(key) && key.value != DType::kI4 && key.value != DType::kU8) ||
          (key.global_scale && key.global_group.cols < 0));
}

TileFormat format_of(const QuantKey& key, const std::vector<const WeightMatrix*>& matrices) {
  TileFormat format;
  format.codes = *codes_of(key);
  if (!key.quantized()) return format;
  const bool integer = key.value == DType::kI4 || key.value == DType::kU8;
  if (!per_group(key) && !integer) return format;
  if (key.global_group.cols > 0) {
    format.group = key.global_group.cols;
    return format;
  }
  constexpr std::int64_t kChannelGroup = 128;  // scales per channel are repeated
  format.group = per_group(key) ? key.group.cols : kChannelGroup;
  format.zeros = !key.symmetric;
  if (format.codes == Codes::kW4A8) {
    format.scales = ScaleType::kBF16;
  } else if (key.scale == DType::kE4M3) {
    format.scales = ScaleType::kE4M3;
  } else if (key.scale == DType::kE8M0) {
    format.scales = ScaleType::kE8M0;
  } else {
    format.scales = common_type(matrices);
  }
  if (!per_group(key)) return format;
  for (const WeightMatrix* matrix : matrices) {
    if (matrix->first_col % format.group == 0) continue;
    FUSEDMOE_CHECK_SUPPORTED(
        matrix->first_col % kGroup == 0 && format.group > kGroup && format.codes != Codes::kW4A8,
        kShape, "first_col", core::to_string(matrix->first_col),
        "a multiple of 32, and of the group for groups of up to 32 and W4A8; experts "
        "'reference' take any");
    format.group = kGroup;
  }
  // MXFP4 has a stream layout of its own, scales included.
  if (format.codes == Codes::kMxfp4) format = {.codes = Codes::kMxfp4};
  return format;
}

bool has_codes(const QuantKey& weights) {
  return codes_of(weights).has_value();
}

bool has_rows(const std::optional<QuantKey>& activations) {
  const bool integers =
      activations && (activations->value == DType::kI8 || activations->value == DType::kI16);
  return !integers || activations->group.cols < 0 || activations->group.cols % kGroup == 0;
}

Compute compute_of(const QuantScheme& scheme, DType dtype) {
  const auto& multiply = kernels().multiply;
  const auto available = [&](Compute compute) {
    return multiply[static_cast<int>(*codes_of(scheme.weights))][static_cast<int>(compute)] &&
           multiply[static_cast<int>(*codes_of(scheme.down_weights()))][static_cast<int>(compute)];
  };
  if (scheme.activations && core::is_integer(*scheme.activations)) {
    const bool wide = scheme.activations->value == DType::kI16;
    const Compute integers = wide ? Compute::kInt16 : Compute::kInt8;
    return available(integers) ? integers : Compute::kF32;
  }
  // Quantized activations are exact in bf16, whatever the layer's dtype.
  const bool bf16 = scheme.activations || dtype == DType::kBF16;
  return bf16 && available(Compute::kBF16) ? Compute::kBF16 : Compute::kF32;
}

}  // namespace fusedmoe::cpu
