// The steps beside the experts on the host, for every backend that runs there.
#pragma once

#include "moe/backend.h"

namespace fusedmoe::core {

/// All steps but the router's logits, which each backend computes in its own way.
class HostBackend : public Backend {
 public:
  void route(const RouterConfig& config, const TensorView& logits,
             const TensorView& correction_bias, const Routing& out, const TensorView& expert_load,
             Stream) const override;
  void count_choices(const TensorView& topk_ids, const TensorView& expert_load,
                     Stream) const override;
  void route_shared(const Routing& out, bool gated, Stream) const override;
  void split_zero_experts(const ZeroExpertsSplit& split, Stream) const override;
  void weight_rows(const TensorView& x, const TensorView& topk_weights, const TensorView& weighted,
                   Stream) const override;
  void quantize(const TensorView& x, const QuantKey& key, std::optional<float> scale,
                const TensorView& values, const TensorView& scales, Stream) const override;
  void dequantize(const TensorView& values, const TensorView& scales, const QuantKey& key,
                  const TensorView& out, Stream) const override;
  void assign_rows(const TensorView& topk_ids, const TensorView& expert_map,
                   const RowAssignment& out, Stream) const override;
  void copy_to_slots(const TensorView& slot_rows, const TensorView& from, const TensorView& to,
                     Stream) const override;
  void reduce(const ReduceArgs& args, const TensorView& slot_rows) const override;
  void find_destinations(const TokenDestinations& destinations, Stream) const override;
  void limit_rows(const RowLimits& limits, Stream) const override;
  void pack_rows(const RowPacking& packing, Stream stream) const override;
  void number_parts(const TensorView& rows, std::int64_t stride, Stream) const override;
  void expand_slots(const SlotExpansion& expansion, std::span<const std::int64_t> rows_of_source,
                    std::span<std::int64_t> counts, Stream) const override;
  void number_slots(const SlotNumbers& numbers, std::span<std::int64_t> counts,
                    Stream) const override;
  void add(const AddArgs& args) const override;
};

}  // namespace fusedmoe::core
