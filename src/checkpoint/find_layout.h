// Which of the layouts and names that a family knows a block's tensors have.
#pragma once

#include "checkpoint/block.h"
#include "checkpoint/block_tensors.h"

namespace fusedmoe::checkpoint {

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

}  // namespace fusedmoe::checkpoint
