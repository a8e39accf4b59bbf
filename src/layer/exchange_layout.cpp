#include "layer/exchange_layout.h"

#include "core/ceil_div.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::layer {
namespace {

bool scale_of_each_rank(const Preparation& preparation) {
  return preparation.quant && preparation.quant->group.rows != 1 && preparation.quant->dynamic;
}

/// Values of rows, and scales where each row has its own (else no columns).
struct RowForm {
  DType values_dtype, scales_dtype = DType::kF32;
  std::int64_t value_columns, scale_columns = 0;

  RowForm(const Preparation& preparation, const ProblemSize& problem)
      : values_dtype(problem.dtype), value_columns(problem.hidden) {
    if (!preparation.quant) return;
    const QuantizedShape shape = quantized_shape(*preparation.quant, 1, problem.hidden);
    values_dtype = shape.values_dtype;
    value_columns = shape.values[1];
    scales_dtype = shape.scales_dtype;
    if (preparation.quant->group.rows == 1) scale_columns = shape.scales[1];
    if (scale_of_each_rank(preparation)) scale_columns = 1;
  }
};

}  // namespace

std::int64_t ExchangeLayout::record_bytes(int num_ranks) {
  const auto bytes =
      sizeof(StepHeader) + static_cast<std::size_t>(num_ranks) * sizeof(std::int32_t);
  return core::round_up(static_cast<std::int64_t>(bytes), alignof(StepHeader));
}

ExchangeLayout::ExchangeLayout(void* workspace, const ProblemSize& problem,
                               const ExchangeSizes& sizes, const Preparation& sent,
                               const Preparation& read, Device device)
    : cutter(workspace), sizes(sizes), own(cutter, problem, sent, device) {
  const bool tensor_scale = scale_of_each_rank(sent);
  const RowForm travelling(sent, problem), reading(read, problem);
  const std::int64_t topk = sizes.topk, ranks = sizes.num_ranks, tokens = sizes.num_tokens;
  const auto take = [&](DType dtype, const Shape& shape) {
    return cutter.take(dtype, shape, device);
  };
  const auto take_rows = [&](const RowForm& form, std::int64_t rows, std::int64_t ids,
                             bool values = true) {
    RowTensors result;
    if (values) result.values = take(form.values_dtype, {rows, form.value_columns});
    if (form.scale_columns > 0) result.scales = take(form.scales_dtype, {rows, form.scale_columns});
    if (sizes.numbers) result.numbers = take(DType::kI32, {rows, 1});
    if (sizes.num_logits > 0) {
      result.logits = take(DType::kF32, {rows, sizes.num_logits});
      return result;
    }
    result.ids = take(DType::kI32, {rows, ids});
    result.weights = take(DType::kF32, {rows, ids});
    return result;
  };
  if (tensor_scale) row_scales = take(DType::kF32, {tokens, 1});
  physical_ids = take(DType::kI32, {tokens, topk});
  send_rows = take(DType::kI32, {tokens, ranks});
  own_rows = take(DType::kI32, {tokens, 1});
  if (!sizes.to_all || sizes.host) send_tokens = take(DType::kI32, {ranks, sizes.max_tokens});
  records = take(DType::kU8, {ranks, record_bytes(sizes.num_ranks)});
  if (records) {
    send_counts = TensorView(record(sizes.rank) + sizeof(StepHeader), DType::kI32, {ranks}, device);
  }
  slot_counts = take(DType::kI32, {ranks});
  const auto take_addresses = [&](std::int64_t rows) {
    return static_cast<const std::byte**>(
        cutter.take(static_cast<std::size_t>(rows) * sizeof(std::byte*)));
  };
  if (sizes.in_place) {
    lent_rows = static_cast<LentRows*>(cutter.take(sizeof(LentRows)));
    lent_sums = static_cast<LentSums*>(cutter.take(sizeof(LentSums)));
    lent_begins = static_cast<std::int64_t*>(
        cutter.take(static_cast<std::size_t>(ranks) * sizeof(std::int64_t)));
  }
  const bool values_stay = sizes.shared && sizes.by_address;
  if (sizes.shared) {
    const bool made_here = sent.quant || sent.apply_router_weight_on_input;
    if (!made_here) published.values = take(problem.dtype, {tokens, problem.hidden});
    if (sizes.num_logits > 0) published.logits = take(DType::kF32, {tokens, sizes.num_logits});
    published.weights = take(DType::kF32, {tokens, topk});
    output =
        take(sizes.combine_dtype, {sizes.capacity * (sizes.per_slot ? topk : 1), sizes.hidden});
  }
  rows = take_rows(travelling, sizes.packs ? packed_begin(sizes.num_ranks) : sizes.capacity, topk,
                   !values_stay);
  received = rows.slice(0, sizes.capacity);
  if (values_stay && output) {
    received.values = TensorView(output.data(), travelling.values_dtype,
                                 {sizes.capacity, travelling.value_columns}, device);
  }
  if (sizes.converts) {
    read_values = take(reading.values_dtype, {sizes.capacity, reading.value_columns});
    if (read.quant) {
      const QuantizedShape shape = quantized_shape(*read.quant, sizes.capacity, problem.hidden);
      read_scales = take(shape.scales_dtype, shape.scales);
    }
  }
  if (sizes.by_address) received_at = take_addresses(sizes.capacity);
  if (sizes.num_logits > 0) {
    routed = {take(DType::kI32, {sizes.capacity, topk}), take(DType::kF32, {sizes.capacity, topk})};
  }
  std::int64_t returning = ranks * sizes.max_tokens;
  if (sizes.per_slot) {
    slot_rows = take(DType::kI32, {sizes.capacity, topk});
    expert_rows = take_rows(reading, sizes.capacity * topk, 1, !sizes.by_address);
    if (sizes.by_address) expert_rows_at = take_addresses(sizes.capacity * topk);
    returned_slots = take(DType::kI32, {tokens, topk});
    returning = tokens * topk;
  }
  if (!sizes.in_place) returned = take(sizes.combine_dtype, {returning, sizes.hidden});
  if (sizes.host) row_addresses = take_addresses(tokens * (sizes.per_slot ? topk : ranks));
  if (sizes.sum_ranks == 1) return;
  partial = take(sizes.combine_dtype, {tokens, sizes.hidden});
  sums.emplace(cutter, tokens, sizes.hidden, sizes.combine_dtype, sizes.sum_ranks, device);
}

}  // namespace fusedmoe::layer
