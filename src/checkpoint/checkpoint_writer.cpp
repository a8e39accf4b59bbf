#include "checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace fusedmoe::checkpoint {

namespace fs = std::filesystem;

PlannedFile::PlannedFile(std::string file_name, const std::vector<PlannedTensor>& tensors)
    : name(std::move(file_name)) {
  std::vector<const PlannedTensor*> order;
  order.reserve(tensors.size());
  for (const PlannedTensor& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto* a, const auto* b) { return bits(a->dtype) > bits(b->dtype); });
  for (const PlannedTensor* tensor : order) {
    const std::int64_t end = data_bytes + bytes(tensor->dtype, tensor->shape.numel());
    entries.push_back({tensor->name, tensor->dtype, tensor->shape, data_bytes, end});
    data_bytes = end;
  }
}

std::vector<PlannedFile> plan_shards(std::vector<PlannedTensor> tensors,
                                     std::int64_t max_shard_bytes) {
  std::vector<std::vector<PlannedTensor>> shards(1);
  std::int64_t shard_bytes = 0;
  for (PlannedTensor& tensor : tensors) {
    const std::int64_t size = bytes(tensor.dtype, tensor.shape.numel());
    if (shard_bytes > 0 && shard_bytes + size > max_shard_bytes) {
      shards.emplace_back();
      shard_bytes = 0;
    }
    shard_bytes += size;
    shards.back().push_back(std::move(tensor));
  }
  std::vector<PlannedFile> files;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    files.emplace_back(shards.size() == 1
                           ? "model.safetensors"
                           : core::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size()),
                       shards[i]);
  }
  return files;
}

std::string index_json(const std::vector<PlannedFile>& shards) {
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  std::int64_t total = 0;
  for (const PlannedFile& file : shards) {
    total += file.data_bytes;
    for (const files::HeaderEntry& entry : file.entries) map[entry.name] = file.name;
  }
  return nlohmann::ordered_json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(
             2) +
         "\n";
}

CheckpointWriter::CheckpointWriter(const fs::path& directory, const std::vector<PlannedFile>& files,
                                   WriteProgress progress)
    : folder_(directory), progress_(std::move(progress)) {
  for (const PlannedFile& file : files) total_ += file.data_bytes;
  const std::uintmax_t free = folder_.free_bytes();
  FUSEDMOE_CHECK_IO(static_cast<std::uintmax_t>(total_) <= free, directory.string(),
                    core::format("cannot write {}: {} bytes are needed, {} are free",
                                 directory.string(), total_, free));
  for (const PlannedFile& file : files) {
    files_.push_back(folder_.create(file.name));
    const std::string header = files::serialize_header(file.entries, {{"format", "pt"}});
    files_.back()->write(header);
    const auto header_bytes = static_cast<std::int64_t>(header.size());
    done_ += header_bytes;
    for (const files::HeaderEntry& entry : file.entries) {
      places_.emplace(entry.name, Place{files_.size() - 1, header_bytes + entry.begin});
    }
  }
}

void CheckpointWriter::write(std::string_view tensor, std::int64_t offset, const void* data,
                             std::size_t size) {
  const Place& place = places_.find(tensor)->second;
  files_[place.file]->write_at(place.begin + offset, data, size);
  advance(static_cast<std::int64_t>(size));
}

void CheckpointWriter::write_file(const std::string& name, const void* data, std::size_t size) {
  const auto file = folder_.create(name);
  file->write(data, size);
  file->flush();
  advance(static_cast<std::int64_t>(size));
}

std::int64_t CheckpointWriter::commit() {
  for (const auto& file : files_) file->flush();
  files_.clear();
  folder_.commit("config.json");
  return done_;
}

void CheckpointWriter::advance(std::int64_t size) {
  done_ += size;
  if (progress_) progress_(std::min(done_, total_), total_);
}

}  // namespace fusedmoe::checkpoint
