#include "cpu/backend.h"

#include "core/parallel.h"
#include "cpu/forward.h"
#include "cpu/kernels.h"
#include "cpu/router.h"
#include "moe/host_backend.h"

namespace fusedmoe::cpu {
namespace {

class CpuBackend final : public core::HostBackend {
 public:
  void router_logits(const RouterWeights& weights, const TensorView& x, const TensorView& logits,
                     Stream stream) const override {
    cpu::router_logits(core::executor_of(stream), weights, x, logits);
  }

  void reduce(const core::ReduceArgs& args, const TensorView& slot_rows) const override {
    if (!args.fused_multiply_add) return HostBackend::reduce(args, slot_rows);
    // The step of the experts itself, which reads up to a vector behind a row.
    const std::int64_t topk = slot_rows.size(1), hidden = args.output.size(1);
    const std::int64_t row_bytes = bytes(args.output.dtype(), args.output.stride(0));
    core::parallel_for(core::executor_of(args.stream), slot_rows.size(0), slot_rows.numel() > 1,
                       [&](std::int64_t token) {
                         ReduceJob job;
                         job.rows = args.fused_output.as<const std::byte>();
                         job.row_bytes = hidden * static_cast<std::int64_t>(sizeof(float));
                         job.indices = slot_rows.as<const std::int32_t>() + token * topk;
                         job.num_indices = topk;
                         if (!args.router_weight_on_input) {
                           job.weights = args.topk_weights.as<const float>() + token * topk;
                         }
                         job.begin = 0;
                         job.end = hidden;
                         job.output = args.output.as<std::byte>() + token * row_bytes;
                         job.dtype = rounding_of(args.output.dtype());
                         job.accumulate = args.accumulate;
                         kernels().reduce(job);
                       });
  }
};

}  // namespace

const core::Backend& backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace fusedmoe::cpu
