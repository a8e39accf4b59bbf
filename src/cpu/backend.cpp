#include "cpu/backend.h"

#include <algorithm>
#include <array>

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
    const bool sums = args.router_weight_on_input && slot_rows && slot_rows.size(1) <= kMostParts;
    if (!args.fused_multiply_add && !sums) return HostBackend::reduce(args, slot_rows);
    const std::int64_t num_tokens = slot_rows.size(0), topk = slot_rows.size(1);
    const bool worthwhile = slot_rows.numel() * args.output.size(1) >= (1 << 15);
    core::parallel_for(core::executor_of(args.stream), num_tokens, worthwhile,
                       [&](std::int64_t token) {
                         const auto* rows = slot_rows.as<const std::int32_t>() + token * topk;
                         if (args.fused_multiply_add) {
                           reduce_slots(args, rows, topk, token);
                         } else {
                           reduce_parts(args, rows, topk, token);
                         }
                       });
  }

 private:
  static constexpr std::int64_t kMostParts = 16;  // that are widened at a time
  static constexpr std::int64_t kColumns = 512;

  static ReduceJob job_of(const core::ReduceArgs& args, std::int64_t token) {
    ReduceJob job;
    job.output =
        args.output.as<std::byte>() + token * bytes(args.output.dtype(), args.output.stride(0));
    job.dtype = rounding_of(args.output.dtype());
    job.accumulate = args.accumulate;
    return job;
  }

  /// The step of the experts themselves, on f32 rows; it reads up to a vector behind a row.
  static void reduce_slots(const core::ReduceArgs& args, const std::int32_t* rows,
                           std::int64_t topk, std::int64_t token) {
    ReduceJob job = job_of(args, token);
    job.rows = args.fused_output.as<const std::byte>();
    job.row_bytes = args.output.size(1) * static_cast<std::int64_t>(sizeof(float));
    job.indices = rows;
    job.num_indices = topk;
    if (!args.router_weight_on_input) {
      job.weights = args.topk_weights.as<const float>() + token * topk;
    }
    job.end = args.output.size(1);
    kernels().reduce(job);
  }

  /// Sums of rows of any dtype: their columns are widened into a block that stays in L1.
  static void reduce_parts(const core::ReduceArgs& args, const std::int32_t* rows,
                           std::int64_t topk, std::int64_t token) {
    alignas(64) std::array<float, kMostParts * kColumns> block;
    std::array<std::int32_t, kMostParts> parts;
    const std::int64_t hidden = args.output.size(1);
    const std::int64_t element = bytes(args.fused_output.dtype(), 1);
    for (std::int64_t begin = 0; begin < hidden; begin += kColumns) {
      const std::int64_t columns = std::min(kColumns, hidden - begin);
      std::int32_t count = 0;
      for (std::int64_t r = 0; r < topk; ++r) {
        if (rows[r] < 0) continue;
        parts[count] = count;
        kernels().convert[static_cast<int>(Compute::kF32)](
            args.fused_output.as<const std::byte>() + (rows[r] * hidden + begin) * element,
            rounding_of(args.fused_output.dtype()), columns, columns,
            reinterpret_cast<std::byte*>(block.data() + count * kColumns));
        ++count;
      }
      ReduceJob job = job_of(args, token);
      job.output = static_cast<std::byte*>(job.output) + bytes(args.output.dtype(), begin);
      job.rows = reinterpret_cast<const std::byte*>(block.data());
      job.row_bytes = kColumns * static_cast<std::int64_t>(sizeof(float));
      job.indices = parts.data();
      job.num_indices = count;
      job.end = columns;
      kernels().reduce(job);
    }
  }
};

}  // namespace

const core::Backend& backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace fusedmoe::cpu
