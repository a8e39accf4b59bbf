#include "layer/prepared_rows.h"

#include "fusedmoe/quant.h"
#include "layer/backend.h"

namespace fusedmoe::layer {

PreparedRows::PreparedRows(core::WorkspaceCutter& cutter, const ProblemSize& problem,
                           const Preparation& preparation, Device device, bool is_placed)
    : preparation_(preparation), device_(device), values_dtype_(problem.dtype) {
  const Shape shape{problem.num_tokens, problem.hidden};
  if (preparation.apply_router_weight_on_input) {
    weighted_ = cutter.take(problem.dtype, shape, device);
  }
  values_shape_ = shape;
  if (!preparation.quant) return;
  const QuantizedShape quantized =
      quantized_shape(*preparation.quant, problem.num_tokens, problem.hidden);
  values_dtype_ = quantized.values_dtype;
  values_shape_ = quantized.values;
  scales_dtype_ = quantized.scales_dtype;
  scales_shape_ = quantized.scales;
  if (!is_placed) values_ = cutter.take(values_dtype_, values_shape_, device);
  if (!is_placed || scale_columns() == 0) {
    scales_ = cutter.take(scales_dtype_, scales_shape_, device);
  }
}

void PreparedRows::place(std::byte* values, std::byte* scales) {
  if (!preparation_.quant) return;
  values_ = TensorView(values, values_dtype_, values_shape_, device_);
  if (scale_columns() > 0) scales_ = TensorView(scales, scales_dtype_, scales_shape_, device_);
}

void PreparedRows::run(ForwardArgs& args) const {
  const core::Backend& backend = backend_of(args.stream.device);
  if (preparation_.apply_router_weight_on_input) {
    backend.weight_rows(args.hidden_states, args.topk_weights, weighted_, args.stream);
    args.hidden_states = weighted_;
  }
  if (!preparation_.quant) return;
  backend.quantize(args.hidden_states, *preparation_.quant, preparation_.scale, values_, scales_,
                   args.stream);
  args.hidden_states = values_;
  args.hidden_scales = scales_;
}

std::int64_t sent_row_bytes(const MoeConfig& config, bool quantized) {
  if (!quantized) return bytes(config.dtype, config.hidden);
  const QuantKey& key = *config.scheme.activations;
  const QuantizedShape row = quantized_shape(key, 1, config.hidden);
  const std::int64_t scales = key.dynamic ? row.scales.numel() : 0;  // a static one is known
  return bytes(row.values_dtype, row.values.numel()) + bytes(row.scales_dtype, scales);
}

}  // namespace fusedmoe::layer
