// One MoE block's tensors -> LayerWeights, strictly.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/find_layout.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

/// Views of the block's tensors. Every tensor that is missing, unclaimed, or of a wrong shape or
/// dtype is collected and reported in one Error; `label` names checkpoint and layer. `experts`: the
/// only ones whose bytes are read, in this order; none: all.
LayerWeights load_block(const ModelConfig& model, const Block& block, const std::string& label,
                        const std::optional<std::vector<std::int32_t>>& experts = {});

/// The input scales that the file does not have. Reads those alone.
std::vector<UncalibratedScale> uncalibrated_scales(const ModelConfig& model, const Block& block,
                                                   const std::string& label);

using LayerSchemes = Checkpoint::LayerSchemes;
/// The checks of load_block that names, shapes and dtypes are enough for; reads no contents.
LayerSchemes check_block(const ModelConfig& model, const Block& block, const std::string& label);

}  // namespace fusedmoe::checkpoint
