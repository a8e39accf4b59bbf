#include "moe/host_backend.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>

#include "core/check.h"
#include "core/parallel.h"
#include "fusedmoe/quant.h"
#include "moe/check_args.h"
#include "moe/element.h"
#include "moe/route.h"
#include "quant/quantize.h"

namespace fusedmoe::core {
namespace {

// target = rnd(source * rnd(weight)) in the dtype of the hidden states.
template <typename Element>
void weight_rows_of(Executor& executor, const TensorView& x, const TensorView& topk_weights,
                    const TensorView& weighted) {
  using Storage = typename Element::Storage;
  const std::int64_t num_tokens = weighted.size(0), hidden = weighted.size(1);
  const auto* weights = topk_weights.as<const float>();
  const auto* source = x.as<const Storage>();
  auto* target = weighted.as<Storage>();
  parallel_for(executor, num_tokens, num_tokens * hidden >= kParallelElements,
               [&](std::int64_t token) {
                 const float weight = Element::load(Element::store(weights[token]));
                 const Storage* from = source + token * x.stride(0);
                 Storage* to = target + token * hidden;
                 for (std::int64_t i = 0; i < hidden; ++i)
                   to[i] = Element::store(Element::load(from[i]) * weight);
               });
}

/// Writes columns of one output row, or adds them to what is there.
void write_columns(const ReduceArgs& args, std::int64_t row, std::int64_t begin,
                   std::span<const float> values) {
  const auto write = [&]<typename Output>(Output) {
    auto* target = args.output.as<typename Output::Storage>() + row * args.output.stride(0) + begin;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float before = args.accumulate ? Output::load(target[i]) : 0.0f;
      target[i] = Output::store(args.accumulate ? before + values[i] : values[i]);
    }
  };
  dispatch_element(args.output.dtype(), write);
}

/// row_of(flat slot) is the index of the slot's row in fused_output, or -1.
template <typename Element, typename RowOf>
void reduce_rows(const ReduceArgs& args, const RowOf& row_of) {
  using Storage = typename Element::Storage;
  const std::int64_t num_tokens = args.topk_ids.size(0), topk = args.topk_ids.size(1);
  const std::int64_t hidden = args.output.size(1);
  const auto* rows = args.fused_output.as<const Storage>();
  const auto* weights = args.topk_weights.as<const float>();
  // The accumulators of one column block stay in registers and L1.
  constexpr std::int64_t kBlock = 256;
  const bool worthwhile = num_tokens * topk * hidden >= kParallelElements;
  parallel_for(executor_of(args.stream), num_tokens, worthwhile, [&](std::int64_t token) {
    std::array<float, kBlock> accumulators;
    for (std::int64_t begin = 0; begin < hidden; begin += kBlock) {
      const std::int64_t width = std::min(kBlock, hidden - begin);
      accumulators.fill(0);
      for (std::int64_t flat = token * topk; flat < (token + 1) * topk; ++flat) {
        const std::int64_t row = row_of(flat);
        if (row < 0) continue;
        const float weight = args.router_weight_on_input ? 1.0f : weights[flat];
        const Storage* source = rows + row * hidden + begin;
        for (std::int64_t i = 0; i < width; ++i)
          accumulators[i] += weight * Element::load(source[i]);
      }
      // Rows of an output may have a stride; a partial sum of a rank stays in f32.
      write_columns(args, token, begin, {accumulators.data(), static_cast<std::size_t>(width)});
    }
  });
}

}  // namespace

void HostBackend::route(const RouterConfig& config, const TensorView& logits,
                        const TensorView& correction_bias, const Routing& out,
                        const TensorView& expert_load, Stream stream) const {
  core::route(executor_of(stream), config, logits, correction_bias, out);
  if (!expert_load) return;
  const auto* ids = out.topk_ids.as<const std::int32_t>();
  auto* load = expert_load.as<std::int32_t>();
  for (std::int64_t slot = 0; slot < out.topk_ids.numel(); ++slot) {
    if (ids[slot] >= 0) ++load[ids[slot]];
  }
}

void HostBackend::route_shared(const Routing& out, bool gated, Stream) const {
  const std::int64_t num_tokens = out.topk_ids.numel();
  auto* weights = out.topk_weights.as<float>();
  std::fill_n(out.topk_ids.as<std::int32_t>(), num_tokens, 0);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const auto logit = static_cast<double>(weights[token]);
    weights[token] = gated ? static_cast<float>(1 / (1 + std::exp(-logit))) : 1.0f;
  }
}

void HostBackend::weight_rows(const TensorView& x, const TensorView& topk_weights,
                              const TensorView& weighted, Stream stream) const {
  dispatch_element(x.dtype(), [&](auto element) {
    weight_rows_of<decltype(element)>(executor_of(stream), x, topk_weights, weighted);
  });
}

void HostBackend::quantize(const TensorView& x, const QuantKey& key, std::optional<float> scale,
                           const TensorView& values, const TensorView& scales,
                           Stream stream) const {
  core::quantize(executor_of(stream), x, key, scale, {values, scales});
}

void HostBackend::dequantize(const TensorView& values, const TensorView& scales,
                             const QuantKey& key, const TensorView& out, Stream stream) const {
  core::dequantize(executor_of(stream), {values, scales}, key, out);
}

// Serial: it is a few operations per slot against a copy of `hidden` elements.
void HostBackend::assign_rows(const TensorView& topk_ids, const TensorView& expert_map,
                              const RowAssignment& out, Stream) const {
  const std::int64_t num_tokens = topk_ids.size(0), topk = topk_ids.size(1);
  const std::int64_t num_local_experts = out.expert_num_tokens.numel();
  auto* counts = out.expert_num_tokens.as<std::int32_t>();
  auto* slot_rows = out.slot_rows.as<std::int32_t>();
  const LocalExperts local_expert(expert_map, num_local_experts);
  std::fill_n(counts, num_local_experts, 0);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const auto* row = topk_ids.as<const std::int32_t>() + token * topk;
    check_distinct({row, static_cast<std::size_t>(topk)}, local_expert, token);
    for (std::int64_t slot = 0; slot < topk; ++slot) {
      const std::int32_t local = local_expert(row[slot]);
      slot_rows[token * topk + slot] = -1;
      if (local < 0) continue;
      slot_rows[token * topk + slot] =
          static_cast<std::int32_t>(local * num_tokens + counts[local]++);
    }
  }
}

void HostBackend::dispatch(const TensorView& slot_rows, const TensorView& from,
                           const TensorView& to, Stream stream) const {
  const std::int64_t num_tokens = slot_rows.size(0), topk = slot_rows.size(1);
  const std::int64_t row_bytes = bytes(from.dtype(), from.size(1));
  const auto* rows = slot_rows.as<const std::int32_t>();
  const std::int64_t stride_bytes = bytes(from.dtype(), from.stride(0));
  const auto* source = from.as<const std::byte>();
  auto* target = to.as<std::byte>();
  const bool worthwhile = num_tokens * topk * row_bytes >= 2 * kParallelElements;
  parallel_for(executor_of(stream), num_tokens, worthwhile, [&](std::int64_t token) {
    for (std::int64_t flat = token * topk; flat < (token + 1) * topk; ++flat) {
      if (rows[flat] < 0) continue;
      std::memcpy(target + rows[flat] * row_bytes, source + token * stride_bytes,
                  static_cast<std::size_t>(row_bytes));
    }
  });
}

void HostBackend::reduce(const ReduceArgs& args, const TensorView& slot_rows) const {
  const auto* ids = args.topk_ids.as<const std::int32_t>();
  const auto* rows = slot_rows ? slot_rows.as<const std::int32_t>() : nullptr;
  const LocalExperts local_expert(args.expert_map, args.num_local_experts);
  const auto row_of = [&](std::int64_t flat) -> std::int64_t {
    if (rows) return rows[flat];
    const bool local = local_expert(ids[flat]) >= 0;
    return local ? flat : -1;
  };
  dispatch_element(args.fused_output.dtype(),
                   [&](auto element) { reduce_rows<decltype(element)>(args, row_of); });
}

void HostBackend::split_zero_experts(const ZeroExpertsSplit& split, Stream) const {
  const auto* ids = split.routing.topk_ids.as<const std::int32_t>();
  const auto* weights = split.routing.topk_weights.as<const float>();
  auto* expert_ids = split.expert_ids.as<std::int32_t>();
  const std::int64_t num_tokens = split.expert_ids.size(0), topk = split.expert_ids.size(1);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    float sum = 0;
    for (std::int64_t slot = token * topk; slot < (token + 1) * topk; ++slot) {
      const std::int64_t id = ids[slot];
      expert_ids[slot] = id < split.num_experts ? ids[slot] : -1;
      if (id >= split.num_experts && id < split.num_choices) sum += weights[slot];
    }
    split.zero_weights.as<float>()[token] = sum;
  }
}

void HostBackend::add(const AddArgs& args) const {
  const TensorView &target = args.target, &source = args.source;
  const auto* scales = args.scale ? args.scale.as<const float>() : nullptr;
  const auto add_rows = [&]<typename To, typename From>(To, From) {
    const std::int64_t columns = target.size(1);
    const auto add_row = [&](std::int64_t row) {
      auto* to = target.as<typename To::Storage>() + row * target.stride(0);
      const auto* from = source.as<const typename From::Storage>() + row * source.stride(0);
      const float scale = scales ? scales[row] : 1.0f;
      for (std::int64_t i = 0; i < columns; ++i) {
        const float addend = scale == 0 ? 0.0f : scale * From::load(from[i]);
        to[i] = To::store(args.accumulate ? To::load(to[i]) + addend : addend);
      }
    };
    parallel_for(executor_of(args.stream), target.size(0), target.numel() >= kParallelElements,
                 add_row);
  };
  dispatch_element(target.dtype(), [&](auto to) {
    dispatch_element(source.dtype(), [&](auto from) { add_rows(to, from); });
  });
}

}  // namespace fusedmoe::core
