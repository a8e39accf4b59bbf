// Row by row work around the experts: the definitions are those of core::Backend. Asynchronous on
// the stream, whose device must be the current one.
#pragma once

#include "moe/backend.h"

namespace fusedmoe::cuda {

void assign_rows(const TensorView& topk_ids, const TensorView& expert_map,
                 const core::RowAssignment& out, Stream stream);
void dispatch_rows(const TensorView& slot_rows, const TensorView& from, const TensorView& to,
                   Stream stream);
void reduce_rows(const core::ReduceArgs& args, const TensorView& slot_rows);

void weight_rows(const TensorView& x, const TensorView& topk_weights, const TensorView& weighted,
                 Stream stream);
void add_rows(const TensorView& target, const TensorView& source, Stream stream);
void route_shared(const Routing& out, bool gated, Stream stream);

}  // namespace fusedmoe::cuda
