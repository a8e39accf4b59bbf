// The rows that the two GEMMs multiply: hidden states in the order of their experts and activated
// rows, copied or quantized as the scheme says.
#pragma once

#include "cuda/experts/packed_weights.h"
#include "cuda/experts/row_format.h"
#include "cuda/experts/scratch.h"
#include "cuda/mlp/fused_mlp.h"
#include "cuda/rows/gather_rows.h"
#include "cuda/rows/permute.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cuda {

/// Of one configuration's experts.
class OperandRows : public RowFormat {
 public:
  using RowFormat::RowFormat;

  /// How GEMM 1 quantizes.
  RowQuantizer inner_quantizer(const CudaPackedWeights& weights) const;

  /// Whether hidden states were quantized before they came.
  bool are_coded(const ForwardArgs& args) const {
    return args.hidden_states.dtype() != format_.row_dtype;
  }
  /// Hidden states to the rows of GEMM 1.
  RowTransform hidden(const ForwardArgs& args, const Scratch& scratch) const;
  /// In the order of the experts.
  void permute_hidden(const ForwardArgs& args, const Scratch& scratch,
                      const RoutingData& routing) const;
  /// The same from ForwardArgs::row_sources; see gather_rows().
  RowArrivals gather_hidden(const ForwardArgs& args, const Scratch& scratch,
                            const RoutingData& routing) const;
  /// In the batched format.
  void transform_hidden(const ForwardArgs& args, const Scratch& scratch) const;
  /// What becomes of rows that GEMM 1 has activated.
  RowTransform activated(const ForwardArgs& args, const Scratch& scratch,
                         const FusedMlpParams& params) const;
  /// Where the launch of both GEMMs does not do that: in a launch of its own. Experts' rows are as
  /// in FusedMlpParams.
  void transform_activated(const ForwardArgs& args, const Scratch& scratch,
                           const FusedMlpParams& params) const;
  /// What a GEMM must know of the rows it multiplies.
  void set_hidden(const ForwardArgs& args, const Scratch& scratch, GemmParams& gemm) const;
  void set_activated(const Scratch& scratch, GemmParams& gemm) const;
  /// Where stores_groups(): what GEMM 1 must know.
  void set_groups(const Scratch& scratch, GemmParams& gemm) const;
  /// The same where stores_codes().
  void set_codes(const ForwardArgs& args, const Scratch& scratch, GemmParams& gemm) const;

 private:
  /// Makes `rows` codes in `to`.
  void set_target(const QuantizedRows& to, std::optional<float> static_scale, std::uint32_t* amax,
                  RowTransform& rows) const;
  RowQuantizer quantizer_of(const PackedMatrices& reader) const;
  PermuteRows permuted(const ForwardArgs& args, const Scratch& scratch,
                       const RoutingData& routing) const;
  CodedRows permuted_codes(const ForwardArgs& args, const Scratch& scratch,
                           const RoutingData& routing) const;
};

}  // namespace fusedmoe::cuda
