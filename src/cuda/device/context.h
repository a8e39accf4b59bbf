// What a CUDA context is and has, asked of the driver at run time: one that is too old to answer is
// no error.
#pragma once

#include <cstdint>

#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// Identifies the CUDA context of the calling thread; no two contexts of a process ever share a
/// number. 0: the thread has no context yet, or the driver is too old to tell. cudaDeviceReset()
/// gives a device a new context.
std::uint64_t current_context_id();

/// Multiprocessors that kernels of a stream may use: those of the device, fewer in a green context.
int multiprocessors_of(Stream stream);

}  // namespace fusedmoe::cuda
