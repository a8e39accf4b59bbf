// What packs and unpacks weights of one WeightFormat. Each operand policy makes its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cuda/formats/weight_format.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cuda {

/// One matrix of an expert (gate and up of a gated w13 count as one) in device memory, contiguous.
struct PackSource {
  const void* values = nullptr;  ///< as WeightMatrix::values; rows of gate, then of up
  std::int64_t row_bytes = 0;    ///< of `values`
  const void* scales = nullptr;  ///< as WeightMatrix::scales, gate's then up's; or null
  const std::uint8_t* zero_points = nullptr;  ///< shaped like `scales`, or null:
  int zero_point = 0;                         ///< all have this one
  DType scale_dtype = DType::kF32;
  /// The largest magnitude of a row of `scales`, or 1, as WeightFormat::relative_scales says; else
  /// null.
  const float* largest_scales = nullptr;
  std::int64_t group_k = -1;    ///< columns that share a scale; -1: all
  std::int64_t first_col = 0;   ///< of `values`, in its first group
  std::int64_t scale_cols = 0;  ///< of a row of `scales`
  std::int64_t width = 0;       ///< rows of one of the matrices
  std::int64_t k = 0;
  bool gated = false;      ///< 2 width rows
  int exponent_shift = 0;  ///< of FormatKernels::exponent_shift

  /// The source row of a packed row; -1 for padding.
  FUSEDMOE_HD std::int64_t source_row(std::int64_t row) const {
    if (!gated) return row < width ? row : -1;
    const std::int64_t feature = gated_feature(row);
    if (feature >= width) return -1;
    return gated_is_up(row) ? width + feature : feature;
  }
  /// Place in `scales` of the scale of a source row and column.
  FUSEDMOE_HD std::int64_t scale_index(std::int64_t row, std::int64_t column) const {
    return row * scale_cols + (group_k < 0 ? 0 : (first_col + column) / group_k);
  }
};

/// The packed blocks of one matrix in host memory, 4-byte aligned.
struct PackedView {
  const std::byte* blocks = nullptr;
  std::int64_t k_blocks = 0;
  std::int64_t k = 0;
  int exponent_shift = 0;
  std::int64_t group_k = -1;   ///< columns that share a scale; -1: all
  std::int64_t first_col = 0;  ///< in the first group
};

/// A row as WeightMatrix has it. Null: the format's blocks do not hold it.
struct UnpackedRow {
  void* values = nullptr;
  void* scales = nullptr;
  std::uint8_t* zero_points = nullptr;
  float largest_scale = 1;  ///< of the row, with relative scales
};

struct FormatKernels {
  WeightFormat format;

  /// The kernel can multiply by scales of a limited range only. Returns the exponent s so that all
  /// scales of the matrices, divided by 2^s, lie in it; results are multiplied by 2^s again. Throws
  /// Error where there is none. `up` is null unless gated. Null: always 0.
  int (*exponent_shift)(const WeightMatrix& gate, const WeightMatrix* up) = nullptr;
  /// Throws Error for scales that a packed block cannot hold. Null: it holds all.
  void (*check_scales)(const WeightMatrix& gate, const WeightMatrix* up) = nullptr;
  /// Writes the packed blocks of a matrix to device memory. Asynchronous.
  void (*pack)(const PackSource& source, const BlockGrid& grid, void* blocks,
               const Stream& stream) = nullptr;
  /// Makes the scales, by packed row, of rows with a NaN code NaN: for operands that decode such a
  /// code to a number. A NaN weight makes the row's results NaN, whatever it is multiplied by.
  /// Null: no code is NaN, or it stays one. Asynchronous.
  void (*mark_nan_rows)(const PackSource& source, const BlockGrid& grid, float* scales,
                        const Stream& stream) = nullptr;
  /// Row `row` of a packed matrix, as WeightMatrix has it.
  void (*unpack_row)(const PackedView& source, std::int64_t row,
                     const UnpackedRow& target) = nullptr;
};

// Of the policies of each file.
std::span<const FormatKernels> as_is_kernels();
std::span<const FormatKernels> fp4_kernels();
std::span<const FormatKernels> fp8_decoded_kernels();
std::span<const FormatKernels> integer_kernels();
std::span<const FormatKernels> mxfp4_fp8_kernels();
std::span<const FormatKernels> w4a8_kernels();

const FormatKernels& kernels_of(const WeightFormat& format);

}  // namespace fusedmoe::cuda
