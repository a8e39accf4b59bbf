// Weight and reduce: output[t] = sum over j of topk_weights[t, j] * row of slot (t, j).
//
// Sums run in fp32 in slot order, product and sum rounded one after the other as on the CPU unless
// they are asked to be rounded as one, and are rounded once to the dtype of the output. Slots
// without a row are skipped, whatever that row holds.
#include "cuda/device/launch.h"
#include "cuda/rows/element.cuh"
#include "cuda/rows/rows.h"
#include "moe/local_experts.h"

namespace fusedmoe::cuda {
namespace {

template <typename Row, typename Output>
struct ReduceParams {
  const std::int32_t* topk_ids;   // (num_tokens, topk)
  const float* topk_weights;      // (num_tokens, topk), or null: sum without them
  const std::int32_t* slot_rows;  // (num_tokens, topk), or null: row f is slot f
  core::LocalExperts local_expert;
  std::int64_t topk;
  std::int64_t hidden;
  const Row* rows;       // may be `output`: every element is read by the thread that writes it
  const Row* elsewhere;  // has those from elsewhere_begin on
  std::int64_t elsewhere_begin, elsewhere_end;
  Output* output;  // (num_tokens, hidden)
  std::int64_t output_stride;
  bool accumulate;
  bool fused_multiply_add;
};

/// Block (token, chunk of columns).
template <typename Row, typename Output, int kWidth>
__global__ __launch_bounds__(kRowThreads) void reduce_rows_kernel(ReduceParams<Row, Output> p) {
  order_after_previous();
  const std::int64_t token = blockIdx.x, column = row_access() * kWidth;
  if (column >= p.hidden) return;
  float sums[kWidth] = {};
  for (std::int64_t flat = token * p.topk; flat < (token + 1) * p.topk; ++flat) {
    const std::int64_t row = p.slot_rows                            ? p.slot_rows[flat]
                             : p.local_expert(p.topk_ids[flat]) < 0 ? -1
                                                                    : flat;
    if (row < 0) continue;
    const float weight = p.topk_weights ? p.topk_weights[flat] : 1.0f;
    const bool is_elsewhere = row >= p.elsewhere_begin && row < p.elsewhere_end;
    const Row* at =
        is_elsewhere ? p.elsewhere + (row - p.elsewhere_begin) * p.hidden : p.rows + row * p.hidden;
    const auto pack = Pack<Row, kWidth>::load(at + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float value = to_f32(pack.values[i]);
      sums[i] = p.fused_multiply_add ? fmaf(weight, value, sums[i])
                                     : __fadd_rn(sums[i], __fmul_rn(weight, value));
    }
  }
  store_sums(sums, p.output + token * p.output_stride + column, p.accumulate);
}

}  // namespace

void reduce_rows(const core::ReduceArgs& args, const TensorView& slot_rows) {
  if (args.output.numel() == 0) return;
  const std::int64_t num_tokens = args.output.size(0), hidden = args.output.size(1);
  const auto launch_kernel = [&](auto row, auto result) {
    using Row = decltype(row);
    using Output = decltype(result);
    const ReduceParams<Row, Output> params{
        args.topk_ids.as<const std::int32_t>(),
        args.router_weight_on_input ? nullptr : args.topk_weights.as<const float>(),
        slot_rows ? slot_rows.as<const std::int32_t>() : nullptr,
        core::LocalExperts(args.expert_map, args.num_local_experts),
        args.topk_ids.size(1),
        hidden,
        args.fused_output.as<const Row>(),
        args.elsewhere.as<const Row>(),
        args.elsewhere_begin,
        args.elsewhere_end,
        args.output.as<Output>(),
        args.output.stride(0),
        args.accumulate,
        args.fused_multiply_add};
    dispatch_width<Row>(
        hidden,
        [&](auto width) {
          constexpr int kWidth = decltype(width)::value;
          launch(reduce_rows_kernel<Row, Output, kWidth>, row_grid(num_tokens, hidden / kWidth),
                 kRowThreads, 0, args.stream, args.follows_kernel, params);
        },
        params.rows, params.elsewhere, params.output, params.output + params.output_stride);
  };
  dispatch_row_and_output(args.fused_output.dtype(), args.output.dtype(), launch_kernel);
}

}  // namespace fusedmoe::cuda
