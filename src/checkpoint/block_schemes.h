// The schemes of a block's experts, by what its tensors hold.
#pragma once

#include <optional>

#include "checkpoint/block.h"
#include "checkpoint/block_tensors.h"

namespace fusedmoe::checkpoint {

/// `plain`: the dtype that the experts' plain tensors have; none: they have none. Throws Error
/// where two experts have different schemes.
QuantScheme scheme_of_experts(const ModelConfig& model, const BlockLayout& layout,
                              const Block& block, std::optional<DType> plain);
/// None: the layer has no shared experts.
std::optional<QuantScheme> scheme_of_shared_experts(const ModelConfig& model,
                                                    const BlockLayout& layout, const Block& block);

}  // namespace fusedmoe::checkpoint
