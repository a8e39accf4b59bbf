// How the rows that both GEMMs multiply are stored, as far as configuration and format of the
// weights tell: what sizes and choices depend on. OperandRows makes the rows.
#pragma once

#include "cuda/formats/weight_format.h"
#include "cuda/mlp/kernel_family.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

/// Of one configuration's experts.
class RowFormat {
 public:
  RowFormat(const MoeConfig& config, const WeightFormat& format, const KernelFamily& family)
      : config_(config), format_(format), family_(family) {}

  /// Whether hidden states are more than permuted.
  bool quantizes() const { return config_.scheme.activations.has_value(); }
  /// Whether rows are codes of a byte and scales; else GEMM 1 quantizes activated rows, if anybody
  /// does.
  bool has_coded_rows() const { return format_.coded_rows(); }
  /// Whether E4M3 codes are stored as the numbers that they are, in f16.
  bool fp8_as_f16() const { return format_.fp8_rows && family_.fp8_as_f16(); }
  /// Whether hidden states of one token differ from expert to expert: NVFP4 has a second scale for
  /// each. What OperandRows::hidden() says of itself, but known without weights.
  bool differ_by_expert() const {
    return quantizes() && !has_coded_rows() && config_.scheme.activations->global_scale;
  }
  /// Whether hidden states take a pass of their own: their scale must be known before.
  bool needs_hidden_pass() const;
  /// True if GEMM 1's tile holds whole groups of 128 features, so that its epilogue can quantize
  /// them.
  bool stores_groups(const TileShape& tile) const {
    return quantizes_groups() && tile.has_whole_groups();
  }
  /// True if several tiles share such a group, and the last one quantizes it.
  bool joins_groups(const TileShape& tile) const {
    return quantizes_groups() && tile.has_parts_of_groups();
  }
  /// True if GEMM 1 quantizes, in tiles of any shape: the scale is known, and the same for all.
  bool stores_codes() const;
  /// Whether the launch of both GEMMs may quantize activated rows (RowPass).
  bool may_have_row_pass() const { return !needs_hidden_pass() && !config_.hooks; }

 private:
  bool quantizes_groups() const;

 protected:
  const MoeConfig& config_;
  const WeightFormat& format_;
  const KernelFamily& family_;
};

}  // namespace fusedmoe::cuda
