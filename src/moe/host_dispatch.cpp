// Which rows go to which rank, on the host. Everything is numbered in the order of tokens and
// slots, never by arrival, so results do not depend on timing.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/parallel.h"
#include "fusedmoe/comm.h"
#include "moe/copy_rows.h"
#include "moe/element.h"
#include "moe/host_backend.h"
#include "moe/local_experts.h"
#include "moe/replica.h"

namespace fusedmoe::core {

void HostBackend::plan_dispatch(const DispatchPlan& plan, Stream) const {
  const std::int64_t num_tokens = plan.topk_ids.size(0), topk = plan.topk_ids.size(1);
  const std::int64_t num_ranks = plan.send_counts ? plan.send_counts.numel() : 0;
  const ReplicaTable table(plan);
  const auto* ids = plan.topk_ids.as<const std::int32_t>();
  const auto* ranks = plan.physical_ranks.as<const std::int32_t>();
  auto* physical = plan.physical_ids.as<std::int32_t>();
  auto* counts = plan.send_counts.as<std::int32_t>();
  auto* tokens = plan.send_tokens.as<std::int32_t>();
  std::fill_n(counts, num_ranks, 0);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    auto* rows = plan.send_rows.as<std::int32_t>() + token * num_ranks;
    std::fill_n(rows, num_ranks, -1);
    for (std::int64_t slot = token * topk; slot < (token + 1) * topk; ++slot) {
      physical[slot] = table.choose(ids[slot], token);
      if (physical[slot] < 0 || num_ranks == 0) continue;
      const std::int32_t rank = ranks[physical[slot]];
      if (rank < 0 || rows[rank] >= 0) continue;
      rows[rank] = static_cast<std::int32_t>(rank * plan.row_stride + counts[rank]++);
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
