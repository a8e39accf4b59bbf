// A checkpoint with its files open and its MoE blocks found.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "checkpoint/checkpoint_files.h"
#include "checkpoint/layer_loader.h"
#include "checkpoint/model_config.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

struct OpenedCheckpoint {
  std::string label;
  CheckpointFiles files;
  std::shared_ptr<const ParsedConfig> parsed;
  ModelConfig config;                    ///< of the first layer with experts
  std::map<std::int64_t, Block> layers;  ///< those that hold experts

  /// Throws Error listing the layers with experts.
  const Block& layer(std::int64_t number) const;
  /// What the config says of that layer, with the scheme that its tensors have.
  ModelConfig layer_config(std::int64_t number) const;
};

/// Parses the config and finds the blocks. `family`: instead of that of the model_type.
OpenedCheckpoint open_checkpoint(CheckpointFiles files, std::string label,
                                 const Family& family = {});

}  // namespace fusedmoe::checkpoint
