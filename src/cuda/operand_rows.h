// The rows that the two GEMMs multiply: hidden states in the order of their experts and activated
// rows, copied or quantized as the scheme says.
#pragma once

#include "cuda/packed_weights.h"
#include "cuda/rows/permute.h"
#include "cuda/scratch.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

/// Of one configuration's experts.
class OperandRows {
 public:
  OperandRows(const MoeConfig& config, const WeightFormat& format)
      : config_(config), format_(format) {}

  /// Whether hidden states are more than permuted.
  bool quantizes() const { return config_.scheme.activations.has_value(); }
  /// Whether rows are E4M3 codes and scales; else GEMM 1 quantizes activated rows, if anybody does.
  bool has_fp8_rows() const { return format_.fp8_rows; }
  /// Whether hidden states of one token differ from expert to expert: NVFP4 has a second scale for
  /// each. What hidden() says of itself, but known without weights.
  bool differ_by_expert() const {
    return quantizes() && !has_fp8_rows() && config_.scheme.activations->global_scale;
  }
  /// Whether GEMM 1 nevertheless quantizes them in tiles of this shape: groups of 128 features of
  /// which it has all.
  bool stores_groups(const TileShape& tile) const;
  /// How GEMM 1 quantizes.
  RowQuantizer inner_quantizer(const CudaPackedWeights& weights) const;

  /// Hidden states to the rows of GEMM 1.
  RowTransform hidden(const ForwardArgs& args, const Scratch& scratch) const;
  /// Whether hidden states take a pass of their own: their scale must be known before.
  bool needs_hidden_pass() const;
  void permute_hidden(const ForwardArgs& args, const Scratch& scratch,
                      const RoutingData& routing) const;
  /// In the batched format.
  void transform_hidden(const ForwardArgs& args, const Scratch& scratch) const;
  /// What becomes of rows that GEMM 1 has activated.
  RowTransform activated(const ForwardArgs& args, const Scratch& scratch,
                         const FusedMlpParams& params) const;
  /// Whether the launch of both GEMMs can do that (RowPass) in tiles of this shape.
  bool has_row_pass(const TileShape& tile) const;
  /// Else a launch of its own does; experts' rows as in FusedMlpParams.
  void transform_activated(const ForwardArgs& args, const Scratch& scratch,
                           const FusedMlpParams& params) const;
  /// What a GEMM must know of the rows it multiplies.
  void set_hidden(const ForwardArgs& args, const Scratch& scratch, GemmParams& gemm) const;
  void set_activated(const Scratch& scratch, GemmParams& gemm) const;
  /// Where stores_groups(): what GEMM 1 must know.
  void set_groups(const Scratch& scratch, GemmParams& gemm) const;

 private:
  RowQuantizer quantizer_of(const PackedMatrices& reader) const;

  const MoeConfig& config_;
  const WeightFormat& format_;
};

}  // namespace fusedmoe::cuda
