#include "cuda/experts/operand_rows.h"

#include "cuda/rows/quantize_rows.h"

namespace fusedmoe::cuda {
namespace {

const CudaPackedWeights& packed(const ForwardArgs& args) {
  return static_cast<const CudaPackedWeights&>(*args.weights);
}

void set_quantized(const QuantizedRows& rows, GemmParams& gemm) {
  gemm.activations = rows.codes;
  gemm.row_pitch = rows.pitch;
  gemm.token_scales = rows.scales;
  gemm.token_scale_pitch = rows.scale_pitch;
}

}  // namespace

void OperandRows::set_target(const QuantizedRows& to, std::optional<float> static_scale,
                             std::uint32_t* amax, RowTransform& rows) const {
  const QuantKey& key = *config_.scheme.activations;
  rows.kind = format_.int8_rows ? RowTransform::Kind::kInt8
              : fp8_as_f16()    ? RowTransform::Kind::kFp8AsF16
                                : RowTransform::Kind::kFp8;
  rows.full_range = key.full_range;
  if (format_.fp8_rows) rows.fp8 = fp8_quantizer(key, static_scale, amax);
  rows.from_f16 = format_.row_dtype == DType::kF16;
  rows.to = to.codes;
  rows.to_pitch = fp8_as_f16() ? 2 * to.pitch : to.pitch;
  rows.scales = to.scales;
  rows.scale_pitch = to.scale_pitch;
}

RowQuantizer OperandRows::quantizer_of(const PackedMatrices& reader) const {
  RowQuantizer quantizer;
  if (!quantizes() || has_coded_rows()) return quantizer;
  using Kind = RowQuantizer::Kind;
  const QuantKey& key = *config_.scheme.activations;
  quantizer.kind = key.value == DType::kE4M3   ? Kind::kMxfp8
                   : key.scale == DType::kE8M0 ? Kind::kMxfp4
                                               : Kind::kNvfp4;
  quantizer.rule = key.scale_rule;
  quantizer.global_scales = reader.input_scales();
  return quantizer;
}

RowQuantizer OperandRows::inner_quantizer(const CudaPackedWeights& weights) const {
  return quantizer_of(weights.w2());
}

RowTransform OperandRows::hidden(const ForwardArgs& args, const Scratch& scratch) const {
  const TensorView& x = args.hidden_states;
  RowTransform rows;
  rows.rows = x.data();
  rows.row_pitch = bytes(format_.row_dtype, x.stride(x.rank() - 2));
  rows.row_bytes = bytes(format_.row_dtype, x.size(x.rank() - 1));
  if (has_coded_rows()) {
    set_target(scratch.hidden, packed(args).info().a1_scale, scratch.amax, rows);
    return rows;
  }
  rows.to = scratch.permuted;
  rows.to_pitch = rows.row_bytes;
  if (quantizes()) rows.kind = RowTransform::Kind::kQuantizeAndDecode;
  rows.decoded = quantizer_of(packed(args).w13());
  return rows;
}

void OperandRows::permute_hidden(const ForwardArgs& args, const Scratch& scratch,
                                 const RoutingData& routing) const {
  if (are_coded(args)) {
    return permute_codes(permuted_codes(args, scratch, routing), *config_.scheme.activations,
                         config_.hidden, args.stream);
  }
  permute_rows(permuted(args, scratch, routing), args.stream);
}

RowArrivals OperandRows::gather_hidden(const ForwardArgs& args, const Scratch& scratch,
                                       const RoutingData& routing) const {
  const GatheredRows from{*args.row_sources, routing, config_.num_local_experts, scratch.arrivals};
  if (are_coded(args)) {
    return gather_codes(permuted_codes(args, scratch, routing), *config_.scheme.activations,
                        config_.hidden, from, args.stream);
  }
  return gather_rows(permuted(args, scratch, routing), from, args.stream);
}

PermuteRows OperandRows::permuted(const ForwardArgs& args, const Scratch& scratch,
                                  const RoutingData& routing) const {
  PermuteRows permute;
  permute.rows = hidden(args, scratch);
  permute.slot_to_row = routing.slot_to_permuted.as<const std::int32_t>();
  permute.num_tokens = args.hidden_states.size(0);
  permute.topk = args.topk_ids.size(1);
  permute.topk_ids = args.topk_ids.as<const std::int32_t>();
  permute.local_experts = core::LocalExperts(args.expert_map, config_.num_local_experts);
  return permute;
}

CodedRows OperandRows::permuted_codes(const ForwardArgs& args, const Scratch& scratch,
                                      const RoutingData& routing) const {
  const QuantKey& key = *config_.scheme.activations;
  CodedRows rows;
  // A static scale is in the factors of the weights.
  rows.from = {args.hidden_states, key.dynamic ? args.hidden_scales : TensorView()};
  rows.slot_to_row = routing.slot_to_permuted.as<const std::int32_t>();
  rows.topk = args.topk_ids.size(1);
  if (format_.fp8_rows) {
    rows.to_dtype = DType::kE4M3;
    rows.fp8_as_f16 = fp8_as_f16();
    rows.to = scratch.hidden.codes;
    rows.to_pitch = rows.fp8_as_f16 ? 2 * scratch.hidden.pitch : scratch.hidden.pitch;
    rows.to_scales = scratch.hidden.scales;
    rows.scale_pitch = scratch.hidden.scale_pitch;
  } else {
    rows.to_dtype = format_.row_dtype;
    rows.to = scratch.permuted;
    rows.to_pitch = bytes(format_.row_dtype, config_.hidden);
  }
  return rows;
}

void OperandRows::transform_hidden(const ForwardArgs& args, const Scratch& scratch) const {
  TransformRows transform;
  transform.rows = hidden(args, scratch);
  transform.num_rows = scratch.rows;
  transform.num_experts = static_cast<int>(config_.num_local_experts);
  transform.expert_num_tokens = args.expert_num_tokens.as<const std::int32_t>();
  transform.capacity = args.hidden_states.size(1);
  transform_rows(transform, false, args.stream);
}

RowTransform OperandRows::activated(const ForwardArgs& args, const Scratch& scratch,
                                    const FusedMlpParams& params) const {
  const std::int64_t size = bytes(format_.row_dtype, 1);
  const GemmParams& first = params.gemms[0];
  RowTransform rows;
  rows.rows = scratch.activated;
  rows.row_pitch = first.out_pitch * size;
  // Rows are written up to a multiple of 8.
  rows.row_bytes = core::round_up(std::int64_t{first.width}, kPitchUnit) * size;
  if (has_coded_rows()) {
    set_target(scratch.quantized, packed(args).info().a2_scale, scratch.amax + 1, rows);
  } else {
    if (quantizes()) rows.kind = RowTransform::Kind::kQuantizeAndDecode;
    rows.to = scratch.quantized.codes;
    rows.to_pitch = rows.row_pitch;
    rows.decoded = params.quantizer;
  }
  return rows;
}

void OperandRows::transform_activated(const ForwardArgs& args, const Scratch& scratch,
                                      const FusedMlpParams& params) const {
  TransformRows transform;
  transform.rows = activated(args, scratch, params);
  transform.num_rows = scratch.rows;
  transform.num_experts = params.num_experts;
  transform.expert_offsets = params.expert_offsets;
  transform.expert_num_tokens = params.expert_num_tokens;
  transform.capacity = params.capacity;
  const bool follows_hooks = config_.hooks;
  transform_rows(transform, !follows_hooks, args.stream);
}

void OperandRows::set_hidden(const ForwardArgs& args, const Scratch& scratch,
                             GemmParams& gemm) const {
  gemm.k = static_cast<int>(config_.hidden);
  gemm.num_rows = scratch.rows;
  if (has_coded_rows()) return set_quantized(scratch.hidden, gemm);
  gemm.activations = scratch.permuted ? scratch.permuted : args.hidden_states.data();
  gemm.row_pitch = config_.hidden;
}

void OperandRows::set_activated(const Scratch& scratch, GemmParams& gemm) const {
  gemm.k = static_cast<int>(config_.intermediate);
  gemm.num_rows = scratch.rows;
  if (has_coded_rows()) return set_quantized(scratch.quantized, gemm);
  gemm.activations = scratch.activated;
  gemm.row_pitch = scratch.activated_pitch;
}

void OperandRows::set_groups(const Scratch& scratch, GemmParams& gemm) const {
  gemm.out = scratch.quantized.codes;
  gemm.out_pitch = scratch.quantized.pitch;
  gemm.out_scales = scratch.quantized.scales;
  gemm.out_scale_pitch = scratch.quantized.scale_pitch;
  gemm.out_power_of_two = config_.scheme.activations->scale == DType::kE8M0;
}

void OperandRows::set_codes(const ForwardArgs& args, const Scratch& scratch,
                            GemmParams& gemm) const {
  gemm.out = scratch.quantized.codes;
  gemm.out_pitch = scratch.quantized.pitch;
  gemm.out_e4m3 = true;
  gemm.out_factor = tensor_factor(packed(args).info().a2_scale.value_or(1));
}

}  // namespace fusedmoe::cuda
