// What experts share: which configurations they serve, and checks of their arguments.
#pragma once

#include <string_view>

#include "fusedmoe/experts.h"

namespace fusedmoe::core {

/// f32, bf16 or f16: what hidden states may be.
bool is_activation_dtype(DType dtype);

/// Sizes must be multiples of these.
struct SizeUnits {
  std::int64_t hidden, intermediate;
};

/// Activation, sizes, format, router weight and expert map of a configuration.
Support supports_anywhere(const MoeConfig& config, ActivationFormat format, SizeUnits units);

/// The CPU's device and dtypes; the scheme, of which the caller says whether it is known and which
/// ones are; and supports_anywhere().
Support supports_on_cpu(const MoeConfig& config, ActivationFormat format, bool scheme_known,
                        std::string_view known_schemes);

/// What every implementation keeps of the weights it packs; validates them.
PackedWeights::Info make_packed_info(const Experts& experts, const ExpertWeights& weights);

/// Throws Error unless `experts` accept the weights and they have this expert.
void check_expert(const Experts& experts, const PackedWeights& packed, std::int64_t expert);

/// Throws Error unless the first of `weights` can replace an expert of packed ones: valid, and of
/// the same scheme, sizes, activation and biases. Static scales per tensor stay those of the
/// packing, so its input scales may not be larger.
void check_replacement(const ExpertWeights& weights, const PackedWeights::Info& packed);

/// The size of the problem that `args` describe. Throws Error for weights that `experts` do not
/// accept, arguments on another device than theirs, shapes, dtypes or counts that do not fit them,
/// and missing workspaces.
ProblemSize check_experts_args(const ModularExperts& experts, const ExpertsArgs& args);

}  // namespace fusedmoe::core
