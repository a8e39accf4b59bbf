// Fast experts on the CPU: "cpu" (standard format) and "cpu_batched".
#pragma once

#include <memory>

#include "fusedmoe/experts.h"

namespace fusedmoe::cpu {

std::shared_ptr<const ModularExperts> make_experts(ActivationFormat format);
/// "cpu_unfused": standard format, with injection points between its steps (ExpertsHooks).
std::shared_ptr<const ModularExperts> make_unfused_experts();

}  // namespace fusedmoe::cpu
