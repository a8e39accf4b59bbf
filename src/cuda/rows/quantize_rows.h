// Rows to codes and scales and back, as they travel between ranks. (The experts quantize rows where
// they permute them: row_transform.h.)
#pragma once

#include "quant/quantize.h"

namespace fusedmoe::cuda {

/// As fusedmoe::quantize(), of keys with has_cuda_quantizer(); rows of `x` may have a stride, and
/// columns are a multiple of 8.
void quantize_rows(const TensorView& x, const QuantKey& key, std::optional<float> scale,
                   const core::QuantizedViews& out, Stream stream);
/// As core::dequantize(), of the same keys and columns.
void dequantize_rows(const core::QuantizedViews& in, const QuantKey& key, const TensorView& out,
                     Stream stream);

/// Rows that were quantized before, in the order of their experts: to[slot_to_row[slot]] = row of
/// token slot / topk. Codes stay as they are where `to_dtype` is theirs, E4M3, else they become
/// what they stand for. Follows the kernel that makes slot_to_row, and overlaps it.
struct CodedRows {
  core::QuantizedViews from;                  ///< (num_tokens, ...); without scales: they are known
  const std::int32_t* slot_to_row = nullptr;  ///< (num_tokens, topk); -1: the slot has no row
  std::int64_t topk = 0;
  DType to_dtype = DType::kBF16;
  bool fp8_as_f16 = false;  ///< codes become the numbers that they are, see device/e4m3_f16.cuh
  void* to = nullptr;
  std::int64_t to_pitch = 0;   ///< bytes
  float* to_scales = nullptr;  ///< of codes: (rows), or of groups (groups, scale_pitch), or null
  std::int64_t scale_pitch = 0;
};
void permute_codes(const CodedRows& rows, const QuantKey& key, std::int64_t columns, Stream stream);

}  // namespace fusedmoe::cuda
