#include "cpu/backend.h"

#include "core/parallel.h"
#include "cpu/forward.h"
#include "cpu/kernels.h"
#include "cpu/router.h"
#include "host/host_backend.h"

namespace fusedmoe::cpu {
namespace {

/// An output of so many bytes leaves the caches before somebody reads it. Stores past them need not
/// read it first: a combine of 2048 tokens then takes three quarters of the time.
constexpr std::int64_t kStreamBytes = 16 << 20;

class CpuBackend final : public core::HostBackend {
 public:
  void router_logits(const RouterWeights& weights, const TensorView& x, const TensorView& logits,
                     Stream stream) const override {
    cpu::router_logits(core::executor_of(stream), weights, x, logits);
  }

  void reduce(const core::ReduceArgs& args, const TensorView& slot_rows) const override {
    if (!args.row_addresses) return HostBackend::reduce(args, slot_rows);
    const std::int64_t num_tokens = args.output.size(0), columns = args.output.size(1);
    const std::int64_t rows = args.rows_per_token;
    const auto sum = [&](std::int64_t token) {
      SumJob job;
      job.rows = args.row_addresses + token * rows;
      if (token + 1 < num_tokens) job.next_rows = job.rows + rows;
      job.row_dtype = rounding_of(args.fused_output.dtype());
      if (!args.router_weight_on_input) {
        job.weights = args.topk_weights.as<const float>() + token * rows;
      }
      job.num_rows = rows;
      job.columns = columns;
      job.output =
          args.output.as<std::byte>() + token * bytes(args.output.dtype(), args.output.stride(0));
      job.dtype = rounding_of(args.output.dtype());
      job.accumulate = args.accumulate;
      job.stream = args.output.nbytes() >= kStreamBytes;
      kernels().sum(job);
    };
    const bool worthwhile = num_tokens * rows * columns >= (1 << 15);
    core::Completing executor(core::executor_of(args.stream));
    core::parallel_for(executor, num_tokens, worthwhile, sum);
  }
};

}  // namespace

const core::Backend& backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace fusedmoe::cpu
