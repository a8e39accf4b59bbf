// What a WeightMatrix of a number format holds, as data: the one place that knows.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::core {

/// Weights for which it is worthwhile to start other threads.
inline constexpr std::int64_t kParallelWeights = 1 << 18;

enum class GlobalScale { kNone, kPerMatrix, kPerRow, kPerBlock };

struct WeightLayout {
  std::span<const DType> values_dtypes;  ///< of WeightMatrix::values, the usual one first
  std::int64_t packing = 1;              ///< elements of a row in one stored value
  bool rows_contiguous = false;
  std::span<const DType> scales_dtypes;  ///< empty: not quantized
  bool zero_points = false;
  GlobalScale global_scale = GlobalScale::kNone;
  std::int64_t zero = 0;  ///< zero point of symmetric codes

  GroupShape global_group{};

  bool quantized() const { return !scales_dtypes.empty(); }
  DType global_dtype() const {
    return global_scale == GlobalScale::kPerBlock ? DType::kF16 : DType::kF32;
  }
  /// Blocks have one factor, or with zero points two.
  std::int64_t factors_per_block() const { return zero_points ? 2 : 1; }
  Shape global_shape(std::int64_t out, std::int64_t in) const {
    if (global_scale == GlobalScale::kPerMatrix) return {1};
    if (global_scale == GlobalScale::kPerRow) return {out};
    return {out, factors_per_block() * ((in + global_group.cols - 1) / global_group.cols)};
  }
  Shape values_shape(std::int64_t out, std::int64_t in) const {
    return {out, (in + packing - 1) / packing};
  }
};

/// "f32, bf16 or f16"
std::string names(std::span<const DType> dtypes);

/// None for a key that no weights have.
std::optional<WeightLayout> find_weight_layout(const QuantKey& key);
/// The same; throws Error(argument) for such a key.
WeightLayout weight_layout(const QuantKey& key, const char* argument);

/// Throws Error naming the part of `argument` that is not as WeightMatrix says for an (out, in)
/// matrix of the key. Reads all scales; does not look at the input scale.
void check_matrix(const WeightMatrix& matrix, const QuantKey& key, const std::string& argument,
                  std::int64_t out, std::int64_t in);

/// Throws Error naming the part of `argument` whose values a matrix of the scheme may not have:
/// scales that are not finite, an input scale that is not positive. Reads what lies in host memory
/// only.
void check_scale_values(const WeightMatrix& matrix, const QuantScheme& scheme,
                        const std::string& argument);

/// An e2m1 view as the bytes that hold it; other views as they are. Throws Error where rows do not
/// begin on whole bytes.
TensorView as_bytes(const TensorView& view, const std::string& argument);

/// The matrix in the first of the forms that WeightMatrix allows: what packers read.
inline WeightMatrix stored_form(const WeightMatrix& matrix) {
  WeightMatrix result = matrix;
  result.values = as_bytes(matrix.values, "values");
  return result;
}

/// Grid of blocks that cover `count` elements, the first of them `first` elements into a block of
/// `extent`; -1 is the whole.
constexpr std::int64_t num_blocks(std::int64_t count, std::int64_t extent, std::int64_t first = 0) {
  return extent < 0 ? 1 : (first + count + extent - 1) / extent;
}

/// Block of element `index`.
constexpr std::int64_t block_of(std::int64_t index, std::int64_t extent, std::int64_t first) {
  return extent < 0 ? 0 : (first + index) / extent;
}

/// Index into `scales`, or zero points, of the block that element (row, col) of a matrix lies in.
inline std::int64_t scale_index(const QuantKey& key, const WeightMatrix& matrix,
                                const TensorView& scales, std::int64_t row, std::int64_t col) {
  return block_of(row, key.group.rows, matrix.first_row) * scales.stride(0) +
         block_of(col, key.group.cols, matrix.first_col) * scales.stride(1);
}

/// Where a matrix begins in a block of scales, and the dtype of its scales; none: the key's.
struct MatrixOrigin {
  std::int64_t first_row = 0, first_col = 0;
  std::optional<DType> scales = std::nullopt;
};
/// An (out, in) matrix of the key whose tensors are zeros, without bias and input scale: what
/// unpacking fills. Appends their owners.
WeightMatrix make_matrix(const QuantKey& key, std::int64_t out, std::int64_t in,
                         const MatrixOrigin& origin,
                         std::vector<std::shared_ptr<const void>>& owners);

}  // namespace fusedmoe::core
