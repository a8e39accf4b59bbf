// Matrices of any strides in device memory -> contiguous rows.
#pragma once

#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// Writes the rows of `from` (rows, columns), of whole bytes, one behind the other to `to`. Both in
/// memory of the stream's device. Asynchronous.
void copy_strided(const TensorView& from, void* to, const Stream& stream);

}  // namespace fusedmoe::cuda
