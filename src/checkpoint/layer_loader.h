// One MoE block's tensors -> LayerWeights, strictly.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/block_tensors.h"
#include "checkpoint/checkpoint_files.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

class ParsedConfig;

/// The tensors under one layer's MoE block.
struct Block {
  std::string prefix;  ///< "model.layers.3.", or "" in a file without prefixes
  std::map<std::string, BlockTensor, std::less<>> tensors;  ///< names without the prefix
  /// Brings a tensor's bytes, which `tensors` then only describes; unset: they are there.
  std::function<Tensor(const std::string& name, const BlockTensor& entry)> read = {};
  /// Names the keys of the config in errors; unset: as the family's description has them.
  std::shared_ptr<const ParsedConfig> config = {};
};

/// The layout that most tensors of the block follow, and the names that are there; the published
/// ones if none is.
BlockLayout find_layout(const ModelConfig& model, const Block& block);

/// The scheme of experts in MXFP4 blocks.
QuantScheme mxfp4_scheme(const BlockLayout& layout);
/// The scheme of experts in linear layers, of which those that are not quantized have this dtype.
QuantScheme per_expert_scheme(const BlockStorage& storage, DType plain);

/// The scheme of the experts: the config's if it is quantized or the tensors tell none, else that
/// of the tensors.
QuantScheme stored_scheme(const ModelConfig& model, const Block& block);

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
/// The tensors that these checks would list; what they throw at once counts as more than any
/// number.
std::size_t count_misfits(const ModelConfig& model, const Block& block);

}  // namespace fusedmoe::checkpoint
