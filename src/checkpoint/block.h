// The tensors of one layer's MoE block, as they are stored.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "checkpoint/checkpoint_files.h"

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

}  // namespace fusedmoe::checkpoint
