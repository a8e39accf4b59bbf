// A format of weights as they are packed for tensor cores, without a device and CUDA's headers.
// format_kernels.h has what packs it, and kernel_set.h of an architecture which kernels it has.
#pragma once

#include <cstdint>
#include <string_view>

#include "cuda/formats/packed_block.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

struct WeightFormat {
  std::string_view name;
  /// Whether weights of this key are packed so.
  bool (*holds)(const QuantKey& weights) = nullptr;
  DType row_dtype = DType::kBF16;  ///< of hidden states and results
  PackedBlock block;
  /// Scales in packed blocks: columns that have the same one, at least; 0: none are there. All
  /// other scales multiply results.
  int group_k = 0;
  DType block_scales = DType::kU8;  ///< their type, as unpacked
  /// They are relative to the largest of their row, by which results are multiplied.
  bool relative_scales = false;
  int fixed_exponent = 0;  ///< results are multiplied by 2 to the power of it

  /// Weights are decoded in registers, which takes the same time for any number of tokens.
  bool decodes = false;
  /// GEMM 2 can apply router weights, see FusedMlpParams::topk_weights.
  bool weights_rows = false;
  /// Activations are E4M3, with scales in fp32.
  bool fp8_rows = false;
  /// The kernel multiplies the sums of each K block by scales.
  bool k_scales = false;
  /// GEMM 1 can quantize and decode what it stores, see FusedMlpParams::quantizer.
  bool quantizes_rows = false;
  /// Activations are INT8, with a scale in fp32 for each row; sums are int32.
  bool int8_rows = false;

  /// Activations are codes of a byte and scales, which rows become before a GEMM.
  constexpr bool coded_rows() const { return fp8_rows || int8_rows; }
  /// What the tensor cores multiply.
  constexpr std::string_view multiplied_as() const {
    return int8_rows ? "INT8" : fp8_rows ? "FP8" : row_dtype == DType::kF16 ? "f16" : "bf16";
  }
  /// GEMM 1 can store E4M3 codes whose scale is known, see GemmParams::out_e4m3. Neither
  /// kernels with scales of K blocks carry the code, nor those that multiply FP8 as f16.
  constexpr bool stores_codes() const { return fp8_rows && !k_scales; }
  BlockGrid grid(std::int64_t width, std::int64_t k, bool gated) const {
    return block_grid(width, k, gated, block.k);
  }
};

/// The row of a table that is of this format; an empty one where there is none.
template <typename Rows>
constexpr typename Rows::value_type row_of_format(const Rows& rows, const WeightFormat& format) {
  for (const auto& row : rows) {
    if (row.format->name == format.name) return row;
  }
  return {};
}

}  // namespace fusedmoe::cuda
