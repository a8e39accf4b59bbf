// Which arrays packed matrices consist of, and how large they are: what can be said before anything
// is packed, without a device.
#pragma once

#include <cstdint>

#include "cuda/formats/packed_block.h"
#include "cuda/formats/weight_format.h"
#include "fusedmoe/experts.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// Of w13 or w2 of all experts.
struct MatrixSizes {
  std::int64_t num_experts, width, k;
  bool gated, bias;
  float activation_scale;  ///< static one of the rows that they multiply; 1: none
};

/// Whether scales of several columns multiply accumulators.
bool has_k_scales(const WeightFormat& format, const QuantKey& key);

/// Shapes of rank 0 are of arrays that there are not.
struct PackedShapes {
  BlockGrid grid;
  Shape blocks;        ///< u8
  Shape bias;          ///< f32, in packed row order
  Shape scales;        ///< f32, the same: what results are multiplied by
  Shape block_scales;  ///< f32, of 8 rows and a K block
  Shape input_scales;  ///< f32, of NVFP4 activations

  PackedShapes() = default;
  PackedShapes(const WeightFormat& format, const QuantScheme& scheme, const MatrixSizes& sizes);
  std::int64_t nbytes() const;
};

/// Of both, for ExpertsDescriptor::packed_bytes(). A static activation scale of 1 takes less.
std::int64_t packed_bytes(const MoeConfig& config, const WeightFormat& format);

}  // namespace fusedmoe::cuda
