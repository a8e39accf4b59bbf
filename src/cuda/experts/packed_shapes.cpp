#include "cuda/experts/packed_shapes.h"

namespace fusedmoe::cuda {

bool has_k_scales(const WeightFormat& format, const QuantKey& key) {
  return format.group_k == 0 && key.quantized() && key.group.cols > 0;
}

PackedShapes::PackedShapes(const WeightFormat& format, const QuantScheme& scheme,
                           const MatrixSizes& sizes)
    : grid(format.grid(sizes.width, sizes.k, sizes.gated)),
      blocks{sizes.num_experts, grid.count() * format.block.bytes} {
  const Shape rows{sizes.num_experts, grid.row_blocks * kBlockRows};
  const bool k_scales = has_k_scales(format, scheme.weights);
  if (sizes.bias) bias = rows;
  const bool is_scaled = scheme.weights.quantized() && !k_scales;
  if (is_scaled || scheme.weights.global_scale || sizes.activation_scale != 1) scales = rows;
  if (k_scales) block_scales = {sizes.num_experts, grid.row_blocks, grid.k_blocks, 8};
  if (scheme.activations && scheme.activations->global_scale) input_scales = {sizes.num_experts};
}

std::int64_t PackedShapes::nbytes() const {
  std::int64_t total = blocks.numel();
  for (const Shape* shape : {&bias, &scales, &block_scales, &input_scales}) {
    if (shape->rank() > 0) total += bytes(DType::kF32, shape->numel());
  }
  return total;
}

std::int64_t packed_bytes(const MoeConfig& config, const WeightFormat& format) {
  const std::optional<QuantKey>& rows = config.scheme.activations;
  const bool is_static = rows && !rows->dynamic && rows->group == GroupShape{-1, -1};
  const float scale = is_static ? 2 : 1;  // any but 1
  const PackedShapes w13(format, config.scheme,
                         {config.num_local_experts, config.intermediate, config.hidden,
                          is_gated(config.activation), config.has_bias, scale});
  const PackedShapes w2(format, config.scheme,
                        {config.num_local_experts, config.hidden, config.intermediate, false,
                         config.has_bias, scale});
  return w13.nbytes() + w2.nbytes();
}

}  // namespace fusedmoe::cuda
