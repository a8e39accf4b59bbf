// Routing data from top-k ids: a stable counting sort of the slots by local expert.
#include "fusedmoe/router.h"

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "moe/local_experts.h"

namespace fusedmoe {
namespace {

void check_inputs(const TensorView& topk_ids, const TensorView& expert_map,
                  std::int64_t num_local_experts) {
  core::check_tensor(topk_ids, "topk_ids", DType::kI32, {-1, -1});
  FUSEDMOE_CHECK_FAULT(topk_ids.numel() <= std::numeric_limits<std::int32_t>::max(), kShape,
                       "topk_ids", core::describe(topk_ids), "of less than 2^31 slots");
  if (expert_map) core::check_tensor(expert_map, "expert_map", DType::kI32, {-1});
  FUSEDMOE_CHECK(topk_ids.device().is_cpu() && expert_map.device().is_cpu(), "topk_ids",
                 core::format("on {}, the expert map on {}", to_string(topk_ids.device()),
                              to_string(expert_map.device())),
                 "on the cpu, as the expert map");
  FUSEDMOE_CHECK(
      num_local_experts >= 1 && num_local_experts < std::numeric_limits<std::int32_t>::max(),
      "num_local_experts", core::to_string(num_local_experts), "in [1, 2^31 - 1)");
}

}  // namespace

std::size_t routing_data_bytes(std::int64_t num_tokens, std::int64_t topk,
                               std::int64_t num_local_experts) {
  const std::int64_t slots = Shape({num_tokens, topk}).numel();
  return sizeof(std::int32_t) * static_cast<std::size_t>(2 * num_local_experts + 1 + 2 * slots);
}

RoutingData build_routing_data(const TensorView& topk_ids, const TensorView& expert_map,
                               std::int64_t num_local_experts, void* memory,
                               std::size_t memory_bytes) {
  check_inputs(topk_ids, expert_map, num_local_experts);
  const std::int64_t slots = topk_ids.numel();
  const std::size_t needed =
      routing_data_bytes(topk_ids.size(0), topk_ids.size(1), num_local_experts);
  FUSEDMOE_CHECK_FAULT(memory_bytes >= needed, kWorkspace, "memory_bytes",
                       core::to_string(memory_bytes), core::format("at least {}", needed));
  FUSEDMOE_CHECK(memory && reinterpret_cast<std::uintptr_t>(memory) % sizeof(std::int32_t) == 0,
                 "memory", memory ? "misaligned" : "null", "4-byte aligned");

  auto* num_rows = static_cast<std::int32_t*>(memory);  // (num_local_experts)
  auto* offsets = num_rows + num_local_experts;         // (num_local_experts + 1)
  auto* to_slot = offsets + num_local_experts + 1;      // (slots)
  auto* to_row = to_slot + slots;                       // (slots)
  const auto* ids = topk_ids.as<const std::int32_t>();
  const core::LocalExperts local_expert(expert_map, num_local_experts);

  std::fill(num_rows, num_rows + num_local_experts, 0);
  for (std::int64_t f = 0; f < slots; ++f) {
    const std::int32_t expert = local_expert(ids[f]);
    if (expert >= 0) ++num_rows[expert];
  }
  // offsets[e + 1] is the next free row of expert e while the slots are placed, and then the end
  // of its rows.
  offsets[0] = 0;
  std::int32_t row = 0;
  for (std::int64_t e = 0; e < num_local_experts; ++e) {
    offsets[e + 1] = row;
    row += num_rows[e];
  }
  std::fill(to_slot + row, to_slot + slots, -1);
  for (std::int64_t f = 0; f < slots; ++f) {
    const std::int32_t expert = local_expert(ids[f]);
    to_row[f] = expert >= 0 ? offsets[expert + 1]++ : -1;
    if (expert >= 0) to_slot[to_row[f]] = static_cast<std::int32_t>(f);
  }
  return {TensorView(num_rows, DType::kI32, {num_local_experts}),
          TensorView(offsets, DType::kI32, {num_local_experts + 1}),
          TensorView(to_slot, DType::kI32, {slots}), TensorView(to_row, DType::kI32, {slots})};
}

void build_bitmatrix(const TensorView& topk_ids, const TensorView& expert_map,
                     std::int64_t num_local_experts, const TensorView& bitmatrix) {
  check_inputs(topk_ids, expert_map, num_local_experts);
  const std::int64_t num_tokens = topk_ids.size(0), topk = topk_ids.size(1);
  const std::int64_t words = (num_local_experts + 31) / 32;
  core::check_tensor(bitmatrix, "bitmatrix", DType::kI32, {num_tokens, words});
  FUSEDMOE_CHECK(bitmatrix.device().is_cpu(), "bitmatrix", to_string(bitmatrix.device()),
                 "on the cpu");

  const auto* ids = topk_ids.as<const std::int32_t>();
  auto* bits = bitmatrix.as<std::uint32_t>();
  const core::LocalExperts local_expert(expert_map, num_local_experts);
  std::fill(bits, bits + num_tokens * words, 0u);
  for (std::int64_t f = 0; f < num_tokens * topk; ++f) {
    const std::int32_t expert = local_expert(ids[f]);
    if (expert >= 0) bits[f / topk * words + expert / 32] |= 1u << (expert % 32);
  }
}

}  // namespace fusedmoe
