// MonolithicExperts over a modular implementation: routes the logits in its own workspace, then
// applies the experts.
//
// Serves every method that route() does, on the CPU custom callbacks included. Refuses router
// weights on the input: that would scale the hidden states before the experts, which is prepare's
// work.
#pragma once

#include <memory>

#include "fusedmoe/experts.h"

namespace fusedmoe {

/// Named after `experts`: "cpu" gives "cpu_monolithic"; uses the same packed weights. `experts`
/// must be of standard format and reduce by themselves (kNoOp), else throws Error.
std::shared_ptr<const MonolithicExperts> make_monolithic(
    std::shared_ptr<const ModularExperts> experts);

}  // namespace fusedmoe
