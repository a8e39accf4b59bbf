// The files of a model in GGUF, and its metadata as the config that families read.
#include <cstdint>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_files.h"
#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// "gguf.<architecture>" as the model_type, and the architecture's own keys without its name.
std::string config_of(const files::GgufFile& file, const std::string& label) {
  const json metadata = json::parse(file.metadata_json());
  const auto found = metadata.find("general.architecture");
  FUSEDMOE_CHECK_FILE(found != metadata.end() && found->is_string(),
                      label + ": general.architecture", "absent", "the name of an architecture");
  const std::string architecture = found->get<std::string>();
  json config{{"model_type", "gguf." + architecture}};
  for (const auto& [key, value] : metadata.items()) {
    if (!key.starts_with(architecture + ".")) continue;
    const std::string own = key.substr(architecture.size() + 1);
    if (own != "model_type" && own.find('.') == std::string::npos) config[own] = value;
  }
  return config.dump();
}

std::int64_t split_number(const files::GgufFile& file, const char* key, std::int64_t otherwise) {
  const json metadata = json::parse(file.metadata_json());
  const auto found = metadata.find(key);
  constexpr std::uint64_t kMost = 1000;
  if (found == metadata.end() || !found->is_number_unsigned()) return otherwise;
  return static_cast<std::int64_t>(std::min(found->get<std::uint64_t>(), kMost));
}

std::string part_name(std::int64_t number, std::int64_t count) {
  return core::format("-{:05}-of-{:05}.gguf", number + 1, count);
}

CheckpointFiles files_of(std::vector<CheckpointFile> parts) {
  CheckpointFiles result;
  result.config_json = config_of(*parts.front().gguf, parts.front().path);
  result.files = std::move(parts);
  return result;
}

CheckpointFile open_file(const fs::path& path, OpenOptions options) {
  return {
      path.string(), {}, std::make_shared<files::GgufFile>(files::GgufFile::open(path, options))};
}

}  // namespace

CheckpointFiles open_gguf(const fs::path& path, OpenOptions options) {
  CheckpointFile named = open_file(path, options);
  const std::int64_t count = split_number(*named.gguf, "split.count", 1);
  if (count <= 1) return files_of({std::move(named)});
  const std::int64_t number = split_number(*named.gguf, "split.no", 0);
  const std::string name = path.filename().string(), end = part_name(number, count);
  FUSEDMOE_CHECK_FILE(
      name.ends_with(end), path.string(), files::quote(name),
      core::format("a name that ends in {}: it is one of {} files of a model", end, count));
  const std::string begin = name.substr(0, name.size() - end.size());
  std::vector<CheckpointFile> parts;
  for (std::int64_t i = 0; i < count; ++i) {
    parts.push_back(open_file(path.parent_path() / (begin + part_name(i, count)), options));
  }
  return files_of(std::move(parts));
}

CheckpointFiles parse_gguf(const void* data, std::size_t size, const std::string& label) {
  auto file = std::make_shared<files::GgufFile>(files::GgufFile::parse(data, size, label));
  return files_of({{label, {}, std::move(file)}});
}

}  // namespace fusedmoe::checkpoint
