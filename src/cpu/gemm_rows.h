// Makes the rows of activations that a grouped GEMM reads. Quantized codes become the elements of
// its dot products: int8 stays int8, others become bf16 or fp32, exactly. Scales that cannot be
// multiplied into the elements are kept beside them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cpu/kernels.h"
#include "cpu/pack.h"

namespace fusedmoe::cpu {

/// The rows that enter one GEMM. Their form depends on scheme, weights and instruction set.
class GemmRows {
 public:
  GemmRows(const QuantScheme& scheme, const PackedGemm& gemm, Compute compute, const Kernels& isa);

  std::int64_t row_bytes() const { return padded_k_ * element_bytes(compute_); }

  /// Floats beside each row: its scale, its group scales and its initial accumulators. In memory
  /// they are ordered by kind: the scales of all rows, then the group scales of all rows, ...
  std::int64_t floats_per_row() const { return 1 + num_group_scales_ + num_initial_; }
  /// Views of these floats from row `first` on, for `num_rows` rows in `memory`.
  RowScales scales(const float* memory, std::int64_t num_rows, std::int64_t first) const;

  /// Turns the codes and scales of row `row` (from Kernels::quantize_row) into elements at `target`
  /// and floats in `memory`. `row_scale` is the tensor's scale or NVFP4's global one; scales per
  /// token are read from `scales` instead.
  void expand(const std::uint8_t* codes, const void* scales, float row_scale, std::byte* target,
              float* memory, std::int64_t num_rows, std::int64_t row) const;
  /// Writes the initial accumulators of a row whose elements are in place.
  void set_initial(const std::byte* elements, float* memory, std::int64_t num_rows,
                   std::int64_t row) const;
  bool has_initial() const { return num_initial_ > 0; }
  /// Makes row `to` of `rows` a copy of row `from`, its floats included.
  void copy_row(std::byte* rows, float* memory, std::int64_t num_rows, std::int64_t from,
                std::int64_t to) const;

 private:
  void expand_int8(const std::uint8_t* codes, std::byte* target) const;
  void expand_floats(const std::uint8_t* codes, const void* scales, std::byte* target) const;
  float group_scale(const void* scales, std::int64_t group) const;

  const Kernels& isa_;
  std::optional<QuantKey> key_;
  Codes codes_;
  Compute compute_;
  std::int64_t k_, padded_k_;
  std::int64_t weight_group_;  // elements of one initial accumulator
  float initial_factor_ = 1;   // minus the zero point, if all weights have the same
  bool fold_groups_ = false;   // group scales are multiplied into elements
  std::int64_t num_group_scales_ = 0, num_initial_ = 0;
  int group_shift_ = 0;
};

}  // namespace fusedmoe::cpu
