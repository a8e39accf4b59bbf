#include "cuda/formats/weight_formats.h"

#include <algorithm>
#include <array>

namespace fusedmoe::cuda {

std::span<const WeightFormat> weight_formats() {
  using namespace formats;  // NOLINT(google-build-using-namespace)
  // kFp8Rows before kFp8, which holds both; symmetric ones before those that hold both, too.
  static constexpr std::array kAll = {
      kBf16,           kF16,        kFp8Rows,     kFp8,        kW4a8,          kMxfp4Bf16,
      kMxfp4Quantized, kMxfp4F16,   kNvfp4Bf16,   kNvfp4F16,   kInt4Symmetric, kInt4G32Symmetric,
      kInt4Bf16,       kInt4F16,    kInt4G32Bf16, kInt4G32F16, kInt8Bf16,      kInt8F16,
      kDecodedE4m3,    kScaledE4m3, kFp8F16,      kMxfp4Fp8,   kInt8Rows,      kInt8RowsF16};
  return kAll;
}

namespace {

/// Integers with scales of rows or of groups of K: `coarse` ones, or 32.
bool is_integer(const QuantKey& key, DType code, bool coarse, bool fine) {
  if (key.value != code || key.scale != DType::kF32 || key.global_scale || key.dynamic)
    return false;
  const GroupShape group = key.group;
  if (group.rows != 1) return false;
  return (coarse && (group.cols < 0 || (group.cols > 0 && group.cols % 64 == 0))) ||
         (fine && group.cols == 32);
}

/// Whether rows quantized with the key are exact in bf16, up to a factor of the expert.
bool fits_bf16(const QuantKey& key) {
  return key.dynamic &&
         (key.value == DType::kE2M1 || (key.value == DType::kE4M3 && key.scale == DType::kE8M0 &&
                                        key.group == GroupShape{1, 32}));
}

/// Whether they are E4M3 with one scale for the tensor, a row, or a row of a K block that may have
/// scales.
bool is_fp8(const QuantKey& key, const WeightFormat& format) {
  return key.value == DType::kE4M3 &&
         (key.group.cols < 0 || (format.k_scales && key.group.cols == format.block.k));
}

/// Whether they are INT8 with a scale for each row.
bool is_int8(const QuantKey& key) {
  return key.value == DType::kI8 && key.dynamic && key.group == GroupShape{1, -1};
}

/// Whether the kernel multiplies such activations by such weights.
bool multiplies(const WeightFormat& format, const std::optional<QuantKey>& key) {
  if (format.fp8_rows) return key && is_fp8(*key, format);
  if (format.int8_rows) return key && is_int8(*key);
  return !key || (format.quantizes_rows && fits_bf16(*key));
}

}  // namespace

bool formats::is_fp8_rows(const QuantKey& key) {
  return key.value == DType::kE4M3 && key.scale == DType::kF32 && !key.dynamic &&
         key.group.cols < 0 && (key.group.rows == -1 || key.group.rows == 1);
}
bool formats::is_fp8(const QuantKey& key) {
  if (key.value != DType::kE4M3 || key.scale != DType::kF32 || key.dynamic) return false;
  return is_fp8_rows(key) || (key.group.cols == kFp8.block.k && key.group.rows % 8 == 0);
}
bool formats::is_int8_rows(const QuantKey& key) {
  return key == keys::int8_row();
}
bool formats::is_w4a8(const QuantKey& key) {
  return key == keys::int4_e4m3();
}
bool formats::is_mxfp4(const QuantKey& key) {
  return key == keys::mxfp4();
}
bool formats::is_nvfp4(const QuantKey& key) {
  return key == keys::nvfp4();
}
bool formats::is_int4_symmetric(const QuantKey& key) {
  return key.symmetric && is_int4(key);
}
bool formats::is_int4_g32_symmetric(const QuantKey& key) {
  return key.symmetric && is_int4_g32(key);
}
bool formats::is_int4(const QuantKey& key) {
  return is_integer(key, DType::kI4, true, false);
}
bool formats::is_int4_g32(const QuantKey& key) {
  return is_integer(key, DType::kI4, false, true);
}
bool formats::is_int8(const QuantKey& key) {
  return is_integer(key, DType::kU8, true, true);
}
bool formats::is_decoded_e4m3(const QuantKey& key) {
  if (key.value != DType::kE4M3 || key.dynamic) return false;
  return key == keys::mxfp8() || key == keys::e4m3_tensor() || key == keys::e4m3_row();
}
bool formats::is_scaled_e4m3(const QuantKey& key) {
  return key.value == DType::kE4M3 && key.scale == DType::kF32 && !key.dynamic &&
         key.group.rows > 1 && key.group.cols > 0 && key.group.cols % kScaledE4m3.group_k == 0;
}

const WeightFormat* find_weight_format(const QuantScheme& scheme, DType row_dtype) {
  if (scheme.down) return nullptr;  // both GEMMs of a launch have one format
  const auto formats = weight_formats();
  const auto found = std::find_if(formats.begin(), formats.end(), [&](const WeightFormat& format) {
    return format.row_dtype == row_dtype && format.holds(scheme.weights) &&
           multiplies(format, scheme.activations);
  });
  return found == formats.end() ? nullptr : &*found;
}

}  // namespace fusedmoe::cuda
