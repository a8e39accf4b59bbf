// The table of weight formats, a row for each policy of this folder. Each must agree with its
// policy, which the policy's file checks when it is compiled.
#pragma once

#include <span>

#include "cuda/formats/weight_format.h"

namespace fusedmoe::cuda::formats {

// What WeightFormat::holds asks.
template <DType kDType>
bool is_unquantized(const QuantKey& key) {
  return key.value == kDType && !key.scale;
}
/// FP8 with scales of rows or the tensor.
bool is_fp8_rows(const QuantKey& key);
/// Those, or scales of blocks of 128 columns and whole slices of 8 rows.
bool is_fp8(const QuantKey& key);
/// INT8 with scales of rows.
bool is_int8_rows(const QuantKey& key);
bool is_w4a8(const QuantKey& key);
bool is_mxfp4(const QuantKey& key);
bool is_nvfp4(const QuantKey& key);
/// Integers with a scale for each row and group: a multiple of 64 columns or the row, or 32.
bool is_int4_symmetric(const QuantKey& key);
bool is_int4_g32_symmetric(const QuantKey& key);
bool is_int4(const QuantKey& key);
bool is_int4_g32(const QuantKey& key);
bool is_int8(const QuantKey& key);
/// FP8 whose scales are powers of two in a block, or multiply results.
bool is_decoded_e4m3(const QuantKey& key);
/// FP8 with scales of blocks of several rows, and columns along K of packed blocks.
bool is_scaled_e4m3(const QuantKey& key);

/// A block of 64 rows by 64 columns of codes, then its scales.
constexpr PackedBlock decoded_block(int bits, int scale_bytes) {
  return {kBlockRows * 64 * bits / 8 + scale_bytes, 64};
}
/// A block of 128 bytes of each row.
constexpr PackedBlock swizzled_block(int element_bytes) {
  return {kBlockRows * 128, 128 / element_bytes};
}
/// 64 rows by 128 columns of 4-bit codes, then one-byte scales.
constexpr PackedBlock fp8_decoded_block(int groups) {
  return {kBlockRows * 128 / 2 + kBlockRows * groups, 128};
}
inline constexpr WeightFormat kBf16{
    .name = "bf16", .holds = is_unquantized<DType::kBF16>, .block = swizzled_block(2)};
inline constexpr WeightFormat kF16{.name = "f16",
                                   .holds = is_unquantized<DType::kF16>,
                                   .row_dtype = DType::kF16,
                                   .block = swizzled_block(2),
                                   .weights_rows = true};
inline constexpr WeightFormat kFp8{
    .name = "fp8", .holds = is_fp8, .block = swizzled_block(1), .fp8_rows = true, .k_scales = true};
inline constexpr WeightFormat kFp8Rows{
    .name = "fp8_rows", .holds = is_fp8_rows, .block = swizzled_block(1), .fp8_rows = true};
inline constexpr WeightFormat kFp8F16{.name = "fp8_f16",
                                      .holds = is_fp8,
                                      .row_dtype = DType::kF16,
                                      .block = swizzled_block(1),
                                      .weights_rows = true,
                                      .fp8_rows = true,
                                      .k_scales = true};
inline constexpr WeightFormat kInt8Rows{
    .name = "int8_rows", .holds = is_int8_rows, .block = swizzled_block(1), .int8_rows = true};
inline constexpr WeightFormat kInt8RowsF16{.name = "int8_rows_f16",
                                           .holds = is_int8_rows,
                                           .row_dtype = DType::kF16,
                                           .block = swizzled_block(1),
                                           .weights_rows = true,
                                           .int8_rows = true};
inline constexpr WeightFormat kW4a8{.name = "w4a8",
                                    .holds = is_w4a8,
                                    .block = fp8_decoded_block(1),
                                    .group_k = 128,
                                    .block_scales = DType::kE4M3,
                                    .decodes = true,
                                    .fp8_rows = true};
inline constexpr WeightFormat kMxfp4Fp8{.name = "mxfp4_fp8",
                                        .holds = is_mxfp4,
                                        .block = fp8_decoded_block(4),
                                        .group_k = 32,
                                        .relative_scales = true,
                                        .fixed_exponent = -6,
                                        .decodes = true,
                                        .fp8_rows = true};

inline constexpr WeightFormat kMxfp4Bf16{.name = "mxfp4",
                                         .holds = is_mxfp4,
                                         .block = decoded_block(4, 128),
                                         .group_k = 32,
                                         .decodes = true};
inline constexpr WeightFormat kMxfp4Quantized{.name = "mxfp4_quantized",
                                              .holds = is_mxfp4,
                                              .block = decoded_block(4, 128),
                                              .group_k = 32,
                                              .decodes = true,
                                              .quantizes_rows = true};
inline constexpr WeightFormat kMxfp4F16{.name = "mxfp4_f16",
                                        .holds = is_mxfp4,
                                        .row_dtype = DType::kF16,
                                        .block = decoded_block(4, 128),
                                        .group_k = 32,
                                        .decodes = true,
                                        .weights_rows = true};
inline constexpr WeightFormat kNvfp4Bf16{.name = "nvfp4",
                                         .holds = is_nvfp4,
                                         .block = decoded_block(4, 256),
                                         .group_k = 16,
                                         .block_scales = DType::kE4M3,
                                         .fixed_exponent = 9,
                                         .decodes = true,
                                         .quantizes_rows = true};
inline constexpr WeightFormat kNvfp4F16{.name = "nvfp4_f16",
                                        .holds = is_nvfp4,
                                        .row_dtype = DType::kF16,
                                        .block = decoded_block(4, 256),
                                        .group_k = 16,
                                        .block_scales = DType::kE4M3,
                                        .fixed_exponent = 7,
                                        .decodes = true,
                                        .weights_rows = true};

/// Of integers: `groups` of K of a block have scales of their own.
constexpr WeightFormat integer(std::string_view name, bool (*holds)(const QuantKey&), DType rows,
                               PackedBlock block, int groups) {
  return {.name = name,
          .holds = holds,
          .row_dtype = rows,
          .block = block,
          .group_k = 64 / groups,
          .block_scales = rows,
          .decodes = true,
          .weights_rows = rows == DType::kF16};
}
/// Scales and zero points of each row.
inline constexpr int kIntegerScales = kBlockRows * 3;
inline constexpr WeightFormat kInt4Symmetric =
    integer("int4_symmetric", is_int4_symmetric, DType::kBF16, decoded_block(4, 128), 1);
inline constexpr WeightFormat kInt4G32Symmetric = integer(
    "int4_g32_symmetric", is_int4_g32_symmetric, DType::kBF16, decoded_block(4, 128 * 2), 2);
inline constexpr WeightFormat kInt4Bf16 =
    integer("int4", is_int4, DType::kBF16, decoded_block(4, kIntegerScales), 1);
inline constexpr WeightFormat kInt4F16 =
    integer("int4_f16", is_int4, DType::kF16, decoded_block(4, kIntegerScales), 1);
inline constexpr WeightFormat kInt4G32Bf16 =
    integer("int4_g32", is_int4_g32, DType::kBF16, decoded_block(4, kIntegerScales * 2), 2);
inline constexpr WeightFormat kInt4G32F16 =
    integer("int4_g32_f16", is_int4_g32, DType::kF16, decoded_block(4, kIntegerScales * 2), 2);
inline constexpr WeightFormat kInt8Bf16 =
    integer("int8", is_int8, DType::kBF16, decoded_block(8, kIntegerScales * 2), 2);
inline constexpr WeightFormat kInt8F16 =
    integer("int8_f16", is_int8, DType::kF16, decoded_block(8, kIntegerScales * 2), 2);

inline constexpr WeightFormat kDecodedE4m3{.name = "e4m3_w16",
                                           .holds = is_decoded_e4m3,
                                           .block = decoded_block(8, 128),
                                           .group_k = 32,
                                           .decodes = true,
                                           .quantizes_rows = true};
inline constexpr WeightFormat kScaledE4m3{.name = "e4m3_block_w16",
                                          .holds = is_scaled_e4m3,
                                          .block = decoded_block(8, 128),
                                          .group_k = 64,
                                          .block_scales = DType::kF32,
                                          .relative_scales = true,
                                          .decodes = true};

}  // namespace fusedmoe::cuda::formats

namespace fusedmoe::cuda {

std::span<const WeightFormat> weight_formats();
/// The one that runs the scheme on rows of this dtype; null where there is none.
const WeightFormat* find_weight_format(const QuantScheme& scheme, DType row_dtype);

}  // namespace fusedmoe::cuda
