// The files of a checkpoint: config text and opened safetensors, in one of the published forms.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "fusedmoe/safetensors.h"

namespace fusedmoe::checkpoint {

/// Which shard holds which tensor.
inline constexpr const char* kIndexName = "model.safetensors.index.json";

struct CheckpointFile {
  std::string path;
  SafetensorsFile contents;
};

struct CheckpointFiles {
  std::string config_json;
  std::vector<std::string> json_paths;  ///< config.json and the index, those that exist
  std::vector<CheckpointFile> files;
  /// Tensor name -> position in `files`, of a directory.
  std::map<std::string, std::size_t, std::less<>> weight_map;
};

/// A directory with config.json and safetensors files, or one file with metadata `config`. In a
/// directory: the shards that model.safetensors.index.json names, else every *.safetensors
/// with model tensors. A shard that the index names and that is absent is an Error, and so is a
/// tensor in two files.
CheckpointFiles open_checkpoint_files(const std::filesystem::path& path, OpenOptions options = {});

/// A checkpoint of one file, whose metadata key `config` holds the config.
CheckpointFiles single_file(CheckpointFile file);

}  // namespace fusedmoe::checkpoint
