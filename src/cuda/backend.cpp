#include "cuda/backend.h"

#include "core/check.h"
#include "core/device_runtime.h"
#include "cuda/router/router.h"
#include "cuda/rows/permute.h"
#include "cuda/rows/quantize_rows.h"
#include "cuda/rows/rank_rows.h"
#include "cuda/rows/routing_data.h"
#include "cuda/rows/rows.h"
#include "moe/check_args.h"

namespace fusedmoe::cuda {
namespace {

using core::CurrentDevice;

void check_num_ranks(std::size_t num_ranks) {
  FUSEDMOE_CHECK(num_ranks <= static_cast<std::size_t>(kMaxRanks), "ranks",
                 core::to_string(num_ranks), core::format("at most {} on cuda", kMaxRanks));
}

void check_quantizer(const QuantKey& key, Stream stream) {
  if (core::has_cuda_quantizer(key)) return;
  throw Error::unsupported(
      Reason::kQuantScheme, "preparation.quant",
      core::format("{} on {}", name(QuantScheme{key, {}}), to_string(stream.device)),
      "none, or a number format that rows are quantized to on cuda");
}

class CudaBackend final : public core::Backend {
 public:
  void router_logits(const RouterWeights& weights, const TensorView& x, const TensorView& logits,
                     Stream stream) const override {
    const CurrentDevice current(stream.device);
    cuda::router_logits(weights.weight, weights.bias, x, logits, stream);
  }

  void route(const RouterConfig& config, const TensorView& logits,
             const TensorView& correction_bias, const Routing& out, const TensorView& expert_load,
             Stream stream) const override {
    core::check_custom_routing(config, stream.device);
    const CurrentDevice current(stream.device);
    cuda::route(config, logits, correction_bias, out, expert_load, stream);
  }

  void count_choices(const TensorView& topk_ids, const TensorView& expert_load,
                     Stream stream) const override {
    const CurrentDevice current(stream.device);
    cuda::count_choices(topk_ids, expert_load, stream);
  }

  void route_shared(const Routing& out, bool gated, Stream stream) const override {
    const CurrentDevice current(stream.device);
    cuda::route_shared(out, gated, stream);
  }

  void split_zero_experts(const core::ZeroExpertsSplit& split, Stream stream) const override {
    const CurrentDevice current(stream.device);
    cuda::split_zero_experts(split, stream);
  }

  void weight_rows(const TensorView& x, const TensorView& topk_weights, const TensorView& weighted,
                   Stream stream) const override {
    const CurrentDevice current(stream.device);
    cuda::weight_rows(x, topk_weights, weighted, stream);
  }

  void quantize(const TensorView& x, const QuantKey& key, std::optional<float> scale,
                const TensorView& values, const TensorView& scales, Stream stream) const override {
    check_quantizer(key, stream);
    const CurrentDevice current(stream.device);
    quantize_rows(x, key, scale, {values, scales}, stream);
  }

  void dequantize(const TensorView& values, const TensorView& scales, const QuantKey& key,
                  const TensorView& out, Stream stream) const override {
    check_quantizer(key, stream);
    const CurrentDevice current(stream.device);
    dequantize_rows({values, scales}, key, out, stream);
  }

  void assign_rows(const TensorView& topk_ids, const TensorView& expert_map,
                   const core::RowAssignment& out, Stream stream) const override {
    const CurrentDevice current(stream.device);
    cuda::assign_rows(topk_ids, expert_map, out, stream);
  }

  void copy_to_slots(const TensorView& slot_rows, const TensorView& from, const TensorView& to,
                     Stream stream) const override {
    const CurrentDevice current(stream.device);
    PermuteRows permute;
    permute.rows.rows = from.data();
    permute.rows.row_pitch = bytes(from.dtype(), from.stride(0));
    permute.rows.to = to.data();
    permute.rows.row_bytes = permute.rows.to_pitch = bytes(from.dtype(), from.size(1));
    permute.slot_to_row = slot_rows.as<const std::int32_t>();
    permute.num_tokens = from.size(0);
    permute.topk = slot_rows.size(1);
    permute_rows(permute, stream);
  }

  void reduce(const core::ReduceArgs& args, const TensorView& slot_rows) const override {
    const CurrentDevice current(args.stream.device);
    reduce_rows(args, slot_rows);
  }

  void find_destinations(const core::TokenDestinations& destinations,
                         Stream stream) const override {
    const CurrentDevice current(stream.device);
    cuda::find_destinations(destinations, stream);
  }

  void limit_rows(const core::RowLimits& limits, Stream stream) const override {
    check_num_ranks(limits.room.size());
    const CurrentDevice current(stream.device);
    cuda::limit_rows(limits, stream);
  }

  void pack_rows(const core::RowPacking& packing, Stream stream) const override {
    check_num_ranks(packing.parts.size());
    const CurrentDevice current(stream.device);
    cuda::pack_rows(packing, stream);
  }

  void number_parts(const TensorView& rows, std::int64_t stride, Stream stream) const override {
    const CurrentDevice current(stream.device);
    cuda::number_parts(rows, stride, stream);
  }

  void expand_slots(const core::SlotExpansion& expansion,
                    std::span<const std::int64_t> rows_of_source, std::span<std::int64_t> counts,
                    Stream stream) const override {
    check_num_ranks(counts.size());
    const CurrentDevice current(stream.device);
    cuda::expand_slots(expansion, rows_of_source, counts, stream);
  }

  void number_slots(const core::SlotNumbers& numbers, std::span<std::int64_t> counts,
                    Stream stream) const override {
    check_num_ranks(counts.size());
    const CurrentDevice current(stream.device);
    cuda::number_slots(numbers, counts, stream);
  }

  void add(const core::AddArgs& args) const override {
    const CurrentDevice current(args.stream.device);
    add_rows(args);
  }
};

}  // namespace

const core::Backend& backend() {
  static const CudaBackend backend;
  return backend;
}

}  // namespace fusedmoe::cuda
