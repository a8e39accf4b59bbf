// Rows of activations as a grouped GEMM reads them: quantized codes become elements of its dot
// products (bf16 and fp32 exactly, int8 as they are) with the scales that could not be multiplied
// in beside them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cpu/kernels.h"
#include "cpu/pack.h"

namespace fusedmoe::cpu {

/// The rows that enter one GEMM; a function of scheme, weights and machine.
class OperandRows {
 public:
  OperandRows(const QuantScheme& scheme, const PackedGemm& gemm, Compute compute);

  std::int64_t row_bytes() const { return padded_k_ * element_bytes(compute_); }

  /// Floats beside each row: [row scale | group scales | starts], all rows of each kind together.
  std::int64_t floats_per_row() const { return 1 + num_group_scales_ + num_starts_; }
  /// Where they are for rows from `first` on, of `num_rows` in `memory`.
  RowScales scales(const float* memory, std::int64_t num_rows, std::int64_t first) const;

  /// Codes and scales of one row (core::quantize_row) -> elements at `target`, and what belongs to
  /// row `row` of `num_rows` in `memory`. `row_scale`: of the tensor or NVFP4's global scale; where
  /// scales are per token it is read from `scales`.
  void expand(const std::uint8_t* codes, const void* scales, float row_scale, std::byte* target,
              float* memory, std::int64_t num_rows, std::int64_t row) const;
  /// The same for a row of unquantized elements that is in place: only its starts.
  void start(const std::byte* elements, float* memory, std::int64_t num_rows,
             std::int64_t row) const;
  /// Whether start() has anything to do.
  bool has_starts() const { return num_starts_ > 0; }

 private:
  void expand_int8(const std::uint8_t* codes, std::byte* target) const;
  void expand_floats(const std::uint8_t* codes, const void* scales, std::byte* target) const;
  float code_value(const std::uint8_t* codes, std::int64_t i) const;
  float group_scale(const void* scales, std::int64_t group) const;

  std::optional<QuantKey> key_;
  Codes codes_;
  Compute compute_;
  std::int64_t k_, padded_k_;
  std::int64_t weight_group_;  // elements of one start
  float start_factor_ = 1;     // minus the zero point that all weights have
  bool fold_groups_ = false;   // group scales are multiplied into elements
  std::int64_t num_group_scales_ = 0, num_starts_ = 0;
  int group_shift_ = 0;
};

}  // namespace fusedmoe::cpu
