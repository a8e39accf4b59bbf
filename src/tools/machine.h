// What this machine can do: the denominators of every performance figure.
#pragma once

#include <cstdint>

#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// Bytes per second that all threads together read from `memory` (host, contiguous), each its own
/// part, from front to back. Some 10 MB and more: what lies in a cache is read at its speed.
double measure_read_bandwidth(const TensorView& memory);

/// FLOP per second of all threads together, with operands in registers: bf16 dot products for
/// DType::kBF16 where the instruction set has them, fp32 multiply-adds otherwise. Takes about a
/// millisecond.
double measure_flop_rate(DType dtype);

}  // namespace fusedmoe
