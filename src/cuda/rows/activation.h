// The activation between the GEMMs as a step of its own, for unfused experts.
#pragma once

#include <cstdint>

#include "fusedmoe/tensor.h"
#include "fusedmoe/weights.h"

namespace fusedmoe::cuda {

/// output (rows, width) = activation of gate_up (rows, 2 width), gate then up, or (rows, width);
/// bf16 or f16 device memory. Rows behind *num_rows (device memory) are left alone. Starts when all
/// work before it is done.
void activate_rows(const ResolvedActivation& activation, DType dtype, const void* gate_up,
                   void* output, std::int64_t rows, std::int64_t width,
                   const std::int32_t* num_rows, const Stream& stream);

}  // namespace fusedmoe::cuda
