#include "layer/weight_and_reduce.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "fusedmoe/device.h"
#include "layer/element.h"

namespace fusedmoe::layer {
namespace {

/// row_of(token, slot) is the index of the slot's row in fused_output, or -1.
template <typename Element, typename RowOf>
void reduce_rows(const FinalizeArgs& args, const RowOf& row_of) {
  using Storage = typename Element::Storage;
  const std::int64_t num_tokens = args.topk_ids.size(0), topk = args.topk_ids.size(1);
  const std::int64_t hidden = args.output.size(1);
  const auto* rows = args.fused_output.as<const Storage>();
  const auto* weights = args.topk_weights.as<const float>();
  auto* output = args.output.as<Storage>();
  // The accumulators of one column block stay in registers and L1.
  constexpr std::int64_t kBlock = 256;

#pragma omp parallel for schedule(static) \
    num_threads(num_threads()) if (num_tokens * topk * hidden >= kParallelElements)
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    std::array<float, kBlock> sums;
    for (std::int64_t begin = 0; begin < hidden; begin += kBlock) {
      const std::int64_t width = std::min(kBlock, hidden - begin);
      sums.fill(0);
      for (std::int64_t slot = 0; slot < topk; ++slot) {
        const std::int64_t row = row_of(token, slot);
        if (row < 0) continue;
        const float weight = args.router_weight_on_input ? 1.0f : weights[token * topk + slot];
        const Storage* source = rows + row * hidden + begin;
        for (std::int64_t i = 0; i < width; ++i) sums[i] += weight * Element::load(source[i]);
      }
      Storage* target = output + token * hidden + begin;
      for (std::int64_t i = 0; i < width; ++i) target[i] = Element::store(sums[i]);
    }
  }
}

}  // namespace

void copy_reduced(const FinalizeArgs& args) {
  if (args.fused_output.data() == args.output.data()) return;
  if (args.output.numel() == 0) return;
  std::memcpy(args.output.data(), args.fused_output.data(),
              static_cast<std::size_t>(args.output.nbytes()));
}

void reduce_contiguous(const FinalizeArgs& args) {
  const std::int64_t topk = args.topk_ids.size(1);
  const auto* ids = args.topk_ids.as<const std::int32_t>();
  const auto row_of = [&](std::int64_t token, std::int64_t slot) {
    const std::int64_t flat = token * topk + slot;
    const bool local = local_expert(ids[flat], args.expert_map, args.num_local_experts) >= 0;
    return local ? flat : std::int64_t{-1};
  };
  dispatch_element(args.output.dtype(),
                   [&](auto element) { reduce_rows<decltype(element)>(args, row_of); });
}

void reduce_batched(const FinalizeArgs& args, const std::int32_t* slot_rows) {
  const std::int64_t topk = args.topk_ids.size(1), capacity = args.fused_output.size(1);
  const auto* ids = args.topk_ids.as<const std::int32_t>();
  const auto row_of = [&](std::int64_t token, std::int64_t slot) {
    const std::int64_t flat = token * topk + slot;
    const std::int64_t local = local_expert(ids[flat], args.expert_map, args.num_local_experts);
    return local < 0 ? std::int64_t{-1} : local * capacity + slot_rows[flat];
  };
  dispatch_element(args.output.dtype(),
                   [&](auto element) { reduce_rows<decltype(element)>(args, row_of); });
}

}  // namespace fusedmoe::layer
