// What every PrepareAndFinalize asks of a configuration, and those across ranks of a context.
#pragma once

#include "fusedmoe/modular_kernel.h"

namespace fusedmoe::layer {

/// Dtype, batch invariance, weight on the input, and the sizes of the groups.
Support supports_rows(const MoeConfig& config);
/// Whether rows can travel as MoeConfig::dispatch_dtype says.
Support supports_dispatch_dtype(const MoeConfig& config);

/// Throws Error unless the context has a communicator of the configuration's ranks and device, and
/// options that the transport has and that agree with each other.
void check_rank_options(const PrepareFinalizeDescriptor& transport, const MoeConfig& config,
                        const Context& context);

}  // namespace fusedmoe::layer
