// What a CUDA context is and has, asked of the driver at run time: one that is too old to answer is
// no error.
#pragma once

#include <cstdint>

#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// A number that no other context of the process has or had; 0 where the thread has none yet. After
/// cudaDeviceReset() a device has another context.
std::uint64_t current_context_id();

/// Multiprocessors that kernels of a stream may use: those of the device, fewer in a green context.
int multiprocessors_of(Stream stream);

}  // namespace fusedmoe::cuda
