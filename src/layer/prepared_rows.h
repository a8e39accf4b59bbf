// A rank's own tokens on their way to the experts: weighted and quantized where that is asked for.
#pragma once

#include "core/workspace.h"
#include "fusedmoe/modular_kernel.h"
#include "moe/problem_size.h"

namespace fusedmoe::layer {

/// The same views in the workspace when sizes are computed and when the work is done.
class PreparedRows {
 public:
  /// `is_placed`: place() says where quantized rows go, and they take no workspace.
  PreparedRows(core::WorkspaceCutter& cutter, const ProblemSize& problem,
               const Preparation& preparation, Device device, bool is_placed = false);

  // Columns of the values, and of the scales where each row has its own (else 0).
  DType values_dtype() const { return values_dtype_; }
  DType scales_dtype() const { return scales_dtype_; }
  std::int64_t value_columns() const { return values_shape_[1]; }
  std::int64_t scale_columns() const {
    return preparation_.quant && preparation_.quant->group.rows == 1 ? scales_shape_[1] : 0;
  }

  /// Quantized rows go to this memory, and so do their scales where each row has its own.
  void place(std::byte* values, std::byte* scales);

  /// Replaces the hidden states of `args` by what the experts read, and sets their scales.
  void run(ForwardArgs& args) const;

 private:
  const Preparation preparation_;
  const Device device_;
  DType values_dtype_, scales_dtype_ = DType::kF32;
  Shape values_shape_, scales_shape_;
  TensorView weighted_, values_, scales_;
};

/// Values and scales of a row as it travels to the experts of other ranks.
std::int64_t sent_row_bytes(const MoeConfig& config, bool quantized);

}  // namespace fusedmoe::layer
