#include "host/host_backend.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <span>

#include "core/check.h"
#include "core/copy_rows.h"
#include "core/parallel.h"
#include "fusedmoe/comm.h"
#include "fusedmoe/quant.h"
#include "host/element.h"
#include "moe/check_args.h"
#include "moe/local_experts.h"
#include "moe/replica.h"
#include "moe/router.h"
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
  Completing executor(executor_of(args.stream));
  parallel_for(executor, num_tokens, worthwhile, [&](std::int64_t token) {
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
  if (expert_load) count_choices(out.topk_ids, expert_load, stream);
}

void HostBackend::count_choices(const TensorView& topk_ids, const TensorView& expert_load,
                                Stream) const {
  const auto* ids = topk_ids.as<const std::int32_t>();
  auto* load = expert_load.as<std::int32_t>();
  for (std::int64_t slot = 0; slot < topk_ids.numel(); ++slot) {
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

void HostBackend::copy_to_slots(const TensorView& slot_rows, const TensorView& from,
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
    Completing executor(executor_of(args.stream));
    parallel_for(executor, target.size(0), target.numel() >= kParallelElements, add_row);
  };
  dispatch_element(target.dtype(), [&](auto to) {
    dispatch_element(source.dtype(), [&](auto from) { add_rows(to, from); });
  });
}

// Which rows go to which rank. Everything is numbered in the order of tokens and slots, never by
// arrival, so results do not depend on timing.
void HostBackend::find_destinations(const TokenDestinations& destinations, Stream) const {
  const std::int64_t num_tokens = destinations.topk_ids.size(0),
                     topk = destinations.topk_ids.size(1);
  const std::int64_t num_ranks = destinations.send_counts ? destinations.send_counts.numel() : 0;
  const ReplicaTable table(destinations);
  const auto* ids = destinations.topk_ids.as<const std::int32_t>();
  const auto* ranks = destinations.physical_ranks.as<const std::int32_t>();
  auto* physical = destinations.physical_ids.as<std::int32_t>();
  auto* counts = destinations.send_counts.as<std::int32_t>();
  auto* tokens = destinations.send_tokens.as<std::int32_t>();
  std::fill_n(counts, num_ranks, 0);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    auto* rows = destinations.send_rows.as<std::int32_t>() + token * num_ranks;
    std::fill_n(rows, num_ranks, -1);
    for (std::int64_t slot = token * topk; slot < (token + 1) * topk; ++slot) {
      physical[slot] = table.choose(ids[slot], token);
      if (physical[slot] < 0 || num_ranks == 0) continue;
      const std::int32_t rank = ranks[physical[slot]];
      if (rank < 0 || rows[rank] >= 0) continue;
      rows[rank] = static_cast<std::int32_t>(rank * destinations.row_stride + counts[rank]++);
      tokens[rows[rank]] = static_cast<std::int32_t>(token);
    }
  }
}

void HostBackend::limit_rows(const RowLimits& limits, Stream) const {
  const std::int64_t num_tokens = limits.send_rows.size(0), num_ranks = limits.send_rows.size(1);
  const std::int64_t topk = limits.physical_ids ? limits.physical_ids.size(1) : 0;
  const auto* ranks = limits.physical_ranks.as<const std::int32_t>();
  auto* rows = limits.send_rows.as<std::int32_t>();
  auto* id = limits.physical_ids.as<std::int32_t>();
  std::int32_t dropped = 0;
  for (std::int64_t token = 0; token < num_tokens; ++token, rows += num_ranks) {
    const auto fits = [&](std::int64_t rank) {
      return rows[rank] - rank * limits.row_stride < limits.room[rank];
    };
    for (std::int64_t slot = 0; slot < topk; ++slot, ++id) {
      if (*id >= 0 && ranks[*id] >= 0 && !fits(ranks[*id])) *id = -1;
    }
    for (std::int64_t rank = 0; rank < num_ranks; ++rank) {
      if (fits(rank)) continue;
      rows[rank] = -1;
      ++dropped;
    }
  }
  if (limits.dropped) *limits.dropped.as<std::int32_t>() += dropped;
}

void HostBackend::pack_rows(const RowPacking& packing, Stream stream) const {
  const auto* all_tokens = packing.tokens.as<const std::int32_t>();
  const auto* counts = packing.counts.as<const std::int32_t>();
  for (const RowPacking::Part& part : packing.parts) {
    const std::int32_t* tokens =
        all_tokens ? all_tokens + part.rank * packing.tokens.size(1) : nullptr;
    const std::int64_t there = counts ? counts[part.rank] : packing.tensors.front().from.size(0);
    const std::int64_t filled = std::clamp(there, part.begin, part.end);
    const auto token_of = [&](std::int64_t i) { return tokens ? tokens[i] : i; };
    const auto copy = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t run = 0; begin < end; begin += run) {
        run = run_of(token_of, begin, end);
        for (const RowPacking::Tensor& each : packing.tensors) {
          copy_rows(each.from, token_of(begin), each.to, part.to + begin, run);
        }
      }
    };
    std::int64_t row_bytes = 0;
    for (const RowPacking::Tensor& each : packing.tensors) {
      row_bytes += bytes(each.from.dtype(), each.from.size(1));
    }
    const std::int64_t rows = filled - part.begin;
    const bool worthwhile = rows * row_bytes >= kParallelElements;
    parallel_ranges(
        executor_of(stream), rows, worthwhile,
        [&](std::int64_t begin, std::int64_t end) { copy(part.begin + begin, part.begin + end); });
    if (filled == part.end || !packing.ids) continue;
    const TensorView nobodys = packing.ids.slice(0, part.to + filled, part.to + part.end);
    std::memset(nobodys.data(), 0xff, static_cast<std::size_t>(nobodys.nbytes()));
  }
}

void HostBackend::number_parts(const TensorView& rows, std::int64_t stride, Stream) const {
  const std::int64_t num_ranks = rows.size(1);
  auto* number = rows.as<std::int32_t>();
  for (std::int64_t i = 0; i < rows.size(0); ++i) {
    for (std::int64_t r = 0; r < num_ranks; ++r) {
      *number++ = static_cast<std::int32_t>(r * stride + i);
    }
  }
}

void HostBackend::expand_slots(const SlotExpansion& expansion,
                               std::span<const std::int64_t> rows_of_source,
                               std::span<std::int64_t> counts, Stream) const {
  const std::int64_t topk = expansion.ids.size(1);
  const LocalExperts local_expert(expansion.expert_map, std::numeric_limits<std::int32_t>::max());
  const auto* id = expansion.ids.as<const std::int32_t>();
  auto* slot_row = expansion.slot_rows.as<std::int32_t>();
  auto* row_ids = expansion.row_ids.as<std::int32_t>();
  auto* row_weights = expansion.row_weights.as<float>();
  std::int32_t next = 0;
  for (std::size_t source = 0; source < rows_of_source.size(); ++source) {
    const std::int32_t first = next;
    for (std::int64_t slot = 0; slot < rows_of_source[source] * topk; ++slot, ++id, ++slot_row) {
      *slot_row = -1;
      if (local_expert(*id) < 0) continue;
      row_ids[next] = *id;
      row_weights[next] = 1;
      *slot_row = next++;
    }
    counts[source] = next - first;
  }
}

void HostBackend::number_slots(const SlotNumbers& numbers, std::span<std::int64_t> counts,
                               Stream) const {
  const auto* ids = numbers.physical_ids.as<const std::int32_t>();
  const auto* ranks = numbers.physical_ranks.as<const std::int32_t>();
  const std::int64_t slots = numbers.physical_ids.numel();
  auto* rows = numbers.slot_rows.as<std::int32_t>();
  const auto rank_of = [&](std::int64_t slot) { return ids[slot] < 0 ? -1 : ranks[ids[slot]]; };
  std::fill(counts.begin(), counts.end(), 0);
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    const std::int32_t rank = rank_of(slot);
    rows[slot] = rank < 0 ? -1 : static_cast<std::int32_t>(counts[rank]++);
  }
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    if (rows[slot] < 0) continue;
    const std::int64_t before =
        std::accumulate(counts.begin(), counts.begin() + rank_of(slot), std::int64_t{0});
    rows[slot] += static_cast<std::int32_t>(before);
  }
}

}  // namespace fusedmoe::core
