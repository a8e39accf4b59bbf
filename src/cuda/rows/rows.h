// Row by row work around the experts: the definitions are those of core::Backend. Asynchronous on
// the stream, whose device must be the current one.
#pragma once

#include "moe/backend.h"

namespace fusedmoe::cuda {

/// The output may be f32 whatever the rows are, and its rows may have a stride. With
/// args.accumulate the sum is added to what the output holds, in fp32, before the one rounding.
void reduce_rows(const core::ReduceArgs& args, const TensorView& slot_rows);

/// Rows of `x` may have a stride.
void weight_rows(const TensorView& x, const TensorView& topk_weights, const TensorView& weighted,
                 Stream stream);
/// Rows of both may have a stride.
void add_rows(const core::AddArgs& args);
void split_zero_experts(const core::ZeroExpertsSplit& split, Stream stream);
/// Ids outside of the experts are of nobody.
void count_choices(const TensorView& topk_ids, const TensorView& expert_load, Stream stream);
void route_shared(const Routing& out, bool gated, Stream stream);

}  // namespace fusedmoe::cuda
