#include "cpu/backend.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "core/check.h"
#include "core/parallel.h"
#include "cpu/element.h"
#include "cpu/router.h"
#include "moe/local_experts.h"
#include "quant/quantize.h"

namespace fusedmoe::cpu {
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
  const bool worthwhile = num_tokens * hidden >= kParallelElements;
  core::parallel_for(executor, num_tokens, worthwhile, [&](std::int64_t token) {
    const float weight = Element::load(Element::store(weights[token]));
    for (std::int64_t i = token * hidden; i < (token + 1) * hidden; ++i) {
      target[i] = Element::store(Element::load(source[i]) * weight);
    }
  });
}

/// row_of(slot) is the index of the slot's row in fused_output, or -1.
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
  const bool worthwhile = num_tokens * topk * hidden >= kParallelElements;
  Executor& executor = core::executor_of(args.stream);

  core::parallel_for(executor, num_tokens, worthwhile, [&](std::int64_t token) {
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
      Storage* target = output + token * hidden + begin;
      for (std::int64_t i = 0; i < width; ++i) target[i] = Element::store(accumulators[i]);
    }
  });
}

class CpuBackend final : public core::Backend {
 public:
  void router_logits(const RouterWeights& weights, const TensorView& x, const TensorView& logits,
                     Stream stream) const override {
    cpu::router_logits(core::executor_of(stream), weights, x, logits);
  }

  void route(const RouterConfig& config, const TensorView& logits,
             const TensorView& correction_bias, const Routing& out, Stream stream) const override {
    cpu::route(core::executor_of(stream), config, logits, correction_bias, out);
  }

  void route_shared(const Routing& out, bool gated, Stream) const override {
    const std::int64_t num_tokens = out.topk_ids.numel();
    auto* weights = out.topk_weights.as<float>();
    std::fill_n(out.topk_ids.as<std::int32_t>(), num_tokens, 0);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      const auto logit = static_cast<double>(weights[token]);
      weights[token] = gated ? static_cast<float>(1 / (1 + std::exp(-logit))) : 1.0f;
    }
  }

  void weight_rows(const TensorView& x, const TensorView& topk_weights, const TensorView& weighted,
                   Stream stream) const override {
    dispatch_element(x.dtype(), [&](auto element) {
      weight_rows_of<decltype(element)>(core::executor_of(stream), x, topk_weights, weighted);
    });
  }

  void quantize(const TensorView& x, const QuantKey& key, std::optional<float> scale,
                const TensorView& values, const TensorView& scales, Stream stream) const override {
    core::quantize(core::executor_of(stream), x, key, scale, {values, scales});
  }

  // On one thread: a few operations a slot, while dispatch copies `hidden` elements for each.
  void assign_rows(const TensorView& topk_ids, const TensorView& expert_map,
                   const core::RowAssignment& out, Stream) const override {
    const std::int64_t num_tokens = topk_ids.size(0), topk = topk_ids.size(1);
    const std::int64_t num_local_experts = out.expert_num_tokens.numel();
    auto* counts = out.expert_num_tokens.as<std::int32_t>();
    auto* slot_rows = out.slot_rows.as<std::int32_t>();
    const core::LocalExperts local_expert(expert_map, num_local_experts);
    std::fill_n(counts, num_local_experts, 0);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      const auto* row = topk_ids.as<const std::int32_t>() + token * topk;
      for (std::int64_t slot = 0; slot < topk; ++slot) {
        const std::int64_t local = local_expert(row[slot]);
        slot_rows[token * topk + slot] = -1;
        if (local < 0) continue;
        const auto same = [&](std::int32_t id) { return local_expert(id) == local; };
        FUSEDMOE_CHECK(std::none_of(row, row + slot, same), "topk_ids",
                       core::format("expert {} twice for token {}", row[slot], token),
                       "on distinct local experts within a token in the batched format");
        slot_rows[token * topk + slot] =
            static_cast<std::int32_t>(local * num_tokens + counts[local]++);
      }
    }
  }

  void dispatch(const TensorView& slot_rows, const TensorView& from, const TensorView& to,
                Stream stream) const override {
    const std::int64_t num_tokens = slot_rows.size(0), topk = slot_rows.size(1);
    const std::int64_t row_bytes = bytes(from.dtype(), from.size(1));
    const auto* rows = slot_rows.as<const std::int32_t>();
    const auto* source = from.as<const std::byte>();
    auto* target = to.as<std::byte>();
    const bool worthwhile = num_tokens * topk * row_bytes >= 2 * kParallelElements;
    core::parallel_for(core::executor_of(stream), num_tokens, worthwhile, [&](std::int64_t token) {
      for (std::int64_t flat = token * topk; flat < (token + 1) * topk; ++flat) {
        if (rows[flat] < 0) continue;
        std::memcpy(target + rows[flat] * row_bytes, source + token * row_bytes,
                    static_cast<std::size_t>(row_bytes));
      }
    });
  }

  void reduce(const FinalizeArgs& args, const TensorView& slot_rows) const override {
    const auto* ids = args.topk_ids.as<const std::int32_t>();
    const auto* rows = slot_rows ? slot_rows.as<const std::int32_t>() : nullptr;
    const core::LocalExperts local_expert(args.expert_map, args.num_local_experts);
    const auto row_of = [&](std::int64_t flat) -> std::int64_t {
      if (rows) return rows[flat];
      return local_expert(ids[flat]) >= 0 ? flat : -1;
    };
    dispatch_element(args.output.dtype(),
                     [&](auto element) { reduce_rows<decltype(element)>(args, row_of); });
  }

  void add(const TensorView& target, const TensorView& source, Stream stream) const override {
    dispatch_element(target.dtype(), [&](auto element) {
      using Element = decltype(element);
      using Storage = typename Element::Storage;
      auto* to = target.as<Storage>();
      const auto* from = source.as<const Storage>();
      const std::int64_t count = target.numel();
      core::parallel_for(core::executor_of(stream), count, count >= kParallelElements,
                         [to, from](std::int64_t i) {
                           to[i] = Element::store(Element::load(to[i]) + Element::load(from[i]));
                         });
    });
  }

  void copy(const TensorView& source, const TensorView& destination, Stream) const override {
    if (source.numel() == 0) return;
    std::memcpy(destination.data(), source.data(), static_cast<std::size_t>(source.nbytes()));
  }
};

}  // namespace

const core::Backend& backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace fusedmoe::cpu
