// What experts share: which configurations they serve, and which weights.
#pragma once

#include <string_view>

#include "fusedmoe/experts.h"
#include "fusedmoe/weights.h"
#include "quant/weight_layout.h"

namespace fusedmoe::core {

/// Sizes must be multiples of these.
struct SizeUnits {
  std::int64_t hidden, intermediate;
};

/// Activation, numbers of experts, sizes, router and expert map of a configuration.
Support supports_anywhere(const MoeConfig& config, SizeUnits units);

/// The CPU's device and dtypes; the scheme, of which the caller says whether it is known and which
/// ones are; and supports_anywhere().
Support supports_on_cpu(const MoeConfig& config, bool scheme_known, std::string_view known_schemes);

/// Throws Error unless `descriptor` supports the configuration: for ExpertsDescriptor::create.
void check_supported(const ExpertsDescriptor& descriptor, const MoeConfig& config);

/// ExpertWeights::validate(); without `reads_scales` but for the values of scales, of which there
/// are many: for those who hand the weights to pack(), which reads them.
void check_weights(const ExpertWeights& weights, bool reads_scales);

/// What every implementation keeps of the weights it packs. Validates them and throws Error where
/// they are not of the configuration of `experts`, or the options name a stream of another device.
PackedWeights::Info make_packed_info(const Experts& experts, const ExpertWeights& weights,
                                     const PackOptions& options);

/// Whether packed weights are of a configuration: scheme, sizes, activation, biases, device.
bool matches(const PackedWeights::Info& weights, const MoeConfig& config);

/// Throws Error unless `experts` accept the weights and they have this expert.
void check_expert(const Experts& experts, const PackedWeights& packed, std::int64_t expert);

/// Throws Error unless there is such an expert.
void check_expert_index(const PackedWeights::Info& packed, std::int64_t expert);

/// What is said of one of the experts alone.
PackedWeights::Info info_of_one(PackedWeights::Info packed);

/// Throws Error unless `one` is one expert of the same sizes and scheme, and packed weights may be
/// written to: for PackedWeights::replace_expert().
void check_one_expert(const PackedWeights::Info& packed, std::int64_t expert,
                      const PackedWeights::Info& one);

/// Throws Error for packed weights that nobody may write to.
void check_writable(const PackedWeights::Info& packed);

/// Throws Error unless the first of `weights` can replace an expert of packed ones, which may be
/// written to: valid, and of the same scheme, sizes, activation and biases. Static scales per
/// tensor stay those of the packing, so its input scales may not be larger.
void check_replacement(const ExpertWeights& weights, const PackedWeights::Info& packed);

/// A part that must be there, of this dtype and shape, contiguous. Throws Error.
const Tensor& part(const PackedParts& parts, std::string_view name, DType dtype,
                   const Shape& shape);

/// WeightMatrix::first_row or first_col, as a part has it. Throws Error.
std::int64_t slice_position(std::int64_t value, std::string_view part);

/// The matrices of an expert in the first of the forms that WeightMatrix allows.
inline ExpertMatrices stored_form(const ExpertMatrices& expert) {
  return {stored_form(expert.gate), stored_form(expert.up), stored_form(expert.down)};
}

}  // namespace fusedmoe::core
