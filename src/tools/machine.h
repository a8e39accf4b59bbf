// What this machine can do: the denominators of every performance figure.
#pragma once

#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// Bytes per second that all threads together read from `memory` (host, contiguous). It is cut into
/// three parts, which are read with one, two and four streams a thread; the best counts. Each part
/// must be larger than the caches: what lies there is read at their speed.
double measure_read_bandwidth(const TensorView& memory);

/// Operands of the dot products that measure_flop_rate(dtype) counts: `dtype` if it is kBF16, kI8
/// or kI16 and the instruction set has such products, else kF32.
DType dot_product_dtype(DType dtype);

/// FLOP per second of all threads together, with operands in registers; the better of two runs.
/// Takes about a millisecond.
double measure_flop_rate(DType dtype);

}  // namespace fusedmoe
