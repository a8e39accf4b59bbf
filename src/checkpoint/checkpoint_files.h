// The files of a checkpoint: config text and opened safetensors, in one of the published forms.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "files/gguf.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/safetensors.h"

namespace fusedmoe::checkpoint {

/// Which shard holds which tensor.
inline constexpr const char* kIndexName = "model.safetensors.index.json";

/// A tensor as it is stored: `type` says which blocks of a GGUF file its bytes are; null: none.
struct BlockTensor {
  Tensor tensor;
  std::size_t file = 0;  ///< position in CheckpointFiles::files
  const files::GgmlType* type = nullptr;
  Shape blocked_shape{};  ///< of the elements, with a type
  const Shape& shape() const { return type ? blocked_shape : tensor.shape(); }
};

struct CheckpointFile {
  std::string path;
  SafetensorsFile contents;
  std::shared_ptr<const files::GgufFile> gguf{};  ///< then `contents` is empty

  /// Every tensor as a view, to see what there is.
  std::map<std::string, BlockTensor, std::less<>> tensors() const;
  /// The memory of one of them, with the access of the opening. Throws Error for a changed file.
  Tensor read(const std::string& name) const;
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
/// tensor in two files. Where files cannot be read because of a format that the config names, the
/// Error names that. `family`: instead of that of the model_type.
CheckpointFiles open_checkpoint_files(const std::filesystem::path& path, OpenOptions options = {},
                                      const Family& family = {});

/// A checkpoint of one file, whose metadata key `config` holds the config.
CheckpointFiles single_file(CheckpointFile file);

/// A model in a GGUF file, or in several that each name their number: path is one of them.
CheckpointFiles open_gguf(const std::filesystem::path& path, OpenOptions options);
/// One file in memory.
CheckpointFiles parse_gguf(const void* data, std::size_t size, const std::string& label);

}  // namespace fusedmoe::checkpoint
