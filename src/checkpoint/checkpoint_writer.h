// Writing a checkpoint: its files are planned first, then filled in any order, then put in place.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "files/output.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {

struct PlannedTensor {
  std::string name;
  DType dtype;
  Shape shape;
};

/// A safetensors file: wide elements first, so that all are aligned without padding.
struct PlannedFile {
  std::string name;
  std::vector<files::HeaderEntry> entries;
  std::int64_t data_bytes = 0;

  PlannedFile(std::string file_name, const std::vector<PlannedTensor>& tensors);
};

/// "model.safetensors", or as many shards as keep each below `max_shard_bytes`; no tensor is split.
std::vector<PlannedFile> plan_shards(std::vector<PlannedTensor> tensors,
                                     std::int64_t max_shard_bytes);

/// The text of model.safetensors.index.json.
std::string index_json(const std::vector<PlannedFile>& shards);

/// (done, total) bytes.
using WriteProgress = std::function<void(std::int64_t, std::int64_t)>;

/// A directory with the planned files: complete at its name after commit(), else not there.
class CheckpointWriter {
 public:
  /// Throws Error for a directory that is not new or empty, and for a disk without the space.
  CheckpointWriter(const std::filesystem::path& directory, const std::vector<PlannedFile>& files,
                   WriteProgress progress);

  /// Bytes of a planned tensor, from `offset` on. Every byte must be written once.
  void write(std::string_view tensor, std::int64_t offset, const void* data, std::size_t size);
  /// Another file of the directory.
  void write_file(const std::string& name, const void* data, std::size_t size);
  void write_file(const std::string& name, std::string_view text) {
    write_file(name, text.data(), text.size());
  }
  /// Flushes and puts in place; returns the bytes written.
  std::int64_t commit();

 private:
  struct Place {
    std::size_t file;
    std::int64_t begin;  ///< in the file
  };
  void advance(std::int64_t size);

  files::OutputFolder folder_;
  WriteProgress progress_;
  std::int64_t done_ = 0, total_ = 0;
  std::vector<std::unique_ptr<files::FileWriter>> files_;
  std::map<std::string, Place, std::less<>> places_;
};

}  // namespace fusedmoe::checkpoint
