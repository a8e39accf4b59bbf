// What a checkpoint is quantized to, and whether it can be.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "checkpoint/opened_checkpoint.h"
#include "fusedmoe/quant.h"

namespace fusedmoe {

/// The source's model in another format; `layout` none: the usual one. Throws Error naming the
/// option of QuantizeCheckpointOptions that asks for what nothing stores.
ModelConfig target_model(const checkpoint::OpenedCheckpoint& source, const QuantScheme& scheme,
                         std::optional<CheckpointLayout> layout, MxScaleRule scale_rule);
/// Throws Error for rows that are not whole groups, which other readers of most layouts want.
void check_groups(const ModelConfig& model);
/// Throws Error if what is copied is quantized: the quantization_config of the result has words for
/// one format alone, that of the experts.
void check_copied(const checkpoint::OpenedCheckpoint& source,
                  const std::map<std::string, Tensor>& copied);

}  // namespace fusedmoe
