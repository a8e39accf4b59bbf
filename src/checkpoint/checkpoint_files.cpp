#include "checkpoint/checkpoint_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/model_config.h"
#include "checkpoint/problems.h"
#include "core/check.h"
#include "files/file.h"
#include "files/json.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

namespace fs = std::filesystem;

// A hostile index must not reach files outside its directory.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

void open_shards(const fs::path& directory, const fs::path& index_path, OpenOptions options,
                 CheckpointFiles& result) {
  const nlohmann::json index =
      files::parse_json_object(files::read_text(index_path, files::kMaxIndexBytes),
                               files::kMaxIndexBytes, index_path.string());
  const auto weight_map = index.find("weight_map");
  FUSEDMOE_CHECK_FILE(weight_map != index.end() && weight_map->is_object(),
                      index_path.string() + ": weight_map",
                      weight_map == index.end() ? "absent" : weight_map->type_name(),
                      "an object of tensor names and file names");
  std::map<std::string, std::size_t> positions;
  for (const auto& [tensor, file] : weight_map->items()) {
    FUSEDMOE_CHECK_FILE(
        file.is_string() && is_plain_name(file.get_ref<const std::string&>()),
        index_path.string() + ": weight_map." + files::quote(tensor),
        files::quote(file.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)),
        "the name of a file in the same directory");
    const std::string& name = file.get_ref<const std::string&>();
    const auto [position, is_new] = positions.emplace(name, result.files.size());
    if (is_new) {
      const fs::path path = directory / name;
      result.files.push_back({path.string(), SafetensorsFile::open(path, options)});
    }
    result.weight_map.emplace(tensor, position->second);
  }

  Problems missing;
  for (const auto& [tensor, position] : result.weight_map) {
    const std::string& path = result.files[position].path;
    if (!result.files[position].contents.contains(tensor)) missing.add(tensor, "in " + path);
  }
  FUSEDMOE_CHECK_IO(missing.count() == 0, index_path.string(),
                    core::format("{} names tensors that are not in their files:{}",
                                 index_path.string(), missing.list()));
}

std::vector<fs::path> files_in(const fs::path& directory, std::string_view extension) {
  std::vector<fs::path> paths;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const bool hidden = entry.path().filename().string().starts_with('.');
    if (!hidden && entry.path().extension() == extension) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// Names of a model's tensors are paths. Hidden states and results of `fusedmoe run`, which may lie
// in the same directory, have plain names.
bool holds_model_tensors(const SafetensorsFile& file) {
  const auto& tensors = file.tensors();
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return tensor.first.find('.') != std::string::npos;
  });
}

void open_without_index(const fs::path& directory, OpenOptions options, CheckpointFiles& result) {
  const std::vector<fs::path> paths = files_in(directory, ".safetensors");
  FUSEDMOE_CHECK_IO(
      !paths.empty(), directory.string(),
      core::format("no checkpoint in {}: there is no *.safetensors", directory.string()));
  for (const fs::path& path : paths) {
    SafetensorsFile file = SafetensorsFile::open(path, options);
    if (!holds_model_tensors(file)) continue;
    for (const auto& [name, tensor] : file.tensors()) {
      const auto [position, is_new] = result.weight_map.emplace(name, result.files.size());
      FUSEDMOE_CHECK_IO(
          is_new, directory.string() + ": " + files::quote(name),
          core::format("{}: {} is in two files, {} and {}", directory.string(), files::quote(name),
                       result.files[position->second].path, path.string()));
    }
    result.files.push_back({path.string(), std::move(file)});
  }
}

// ModelOpt writes the quantization beside a config.json that may not mention it.
void merge_quantization(const fs::path& path, CheckpointFiles& result) {
  constexpr const char* kKey = "quantization_config";
  nlohmann::json config =
      files::parse_json_object(result.config_json, files::kMaxConfigBytes, "config");
  if (const auto found = config.find(kKey); found != config.end() && !found->is_null()) return;
  config[kKey] = files::parse_json_object(files::read_text(path, files::kMaxConfigBytes),
                                          files::kMaxConfigBytes, path.string());
  result.config_json = config.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  result.json_paths.push_back(path.string());
}

void open_tensors(const fs::path& directory, OpenOptions options, CheckpointFiles& result) {
  const fs::path index = directory / kIndexName;
  if (!fs::exists(index)) return open_without_index(directory, options, result);
  result.json_paths.push_back(index.string());
  open_shards(directory, index, options, result);
}

CheckpointFiles open_directory(const fs::path& directory, OpenOptions options,
                               const Family& family) {
  CheckpointFiles result;
  const fs::path config = directory / "config.json";
  FUSEDMOE_CHECK_IO(
      fs::exists(config), directory.string(),
      core::format("no checkpoint in {}: there is no config.json{}", directory.string(),
                   files_in(directory, ".gguf").empty()
                       ? ""
                       : "; to open a .gguf file in it, name that file"));
  result.config_json = files::read_text(config, files::kMaxConfigBytes);
  result.json_paths.push_back(config.string());
  const fs::path quantization = directory / "hf_quant_config.json";
  if (fs::exists(quantization)) merge_quantization(quantization, result);
  try {
    open_tensors(directory, options, result);
  } catch (const Error&) {
    // A format that nothing here reads may have tensors that nothing here reads: the config says
    // so first.
    try {
      ParsedConfig(result.config_json, family);
    } catch (const Error& cause) {
      throw cause.within(directory.string());
    }
    throw;
  }
  return result;
}

}  // namespace

std::map<std::string, BlockTensor, std::less<>> CheckpointFile::tensors() const {
  std::map<std::string, BlockTensor, std::less<>> result;
  if (!gguf) {
    for (const auto& [name, tensor] : contents.tensors()) result.emplace(name, BlockTensor{tensor});
    return result;
  }
  for (const auto& [name, entry] : gguf->tensors()) {
    result.emplace(
        name, BlockTensor{entry.tensor, 0, entry.quantized() ? entry.type : nullptr, entry.shape});
  }
  return result;
}

Tensor CheckpointFile::read(const std::string& name) const {
  return gguf ? gguf->read(gguf->tensors().find(name)->second.tensor) : contents.tensor(name);
}

CheckpointFiles single_file(CheckpointFile file) {
  CheckpointFiles result;
  const auto& metadata = file.contents.metadata();
  const auto config = metadata.find("config");
  FUSEDMOE_CHECK_IO(config != metadata.end(), file.path,
                    core::format("{} is no checkpoint: it holds no model config in its metadata, "
                                 "and there is no directory with config.json",
                                 file.path));
  result.config_json = config->second;
  result.files.push_back(std::move(file));
  return result;
}

CheckpointFiles open_checkpoint_files(const fs::path& path, OpenOptions options,
                                      const Family& family) {
  try {
    if (fs::is_directory(path)) return open_directory(path, options, family);
    if (files::is_gguf(path)) return open_gguf(path, options);
    FUSEDMOE_CHECK_IO(
        path.extension() != ".json", path.string(),
        core::format("{} is no checkpoint: name the directory that it is in", path.string()));
    return single_file({path.string(), SafetensorsFile::open(path, options)});
  } catch (const fs::filesystem_error& error) {
    files::fail_system(path, "read", error);
  }
}

// ---- GGUF: the files of a model, and its metadata as the config that families read

namespace {

/// The metadata of a GGUF file as a config. Its model_type is "gguf.<architecture>"; a key of the
/// architecture, as "llama.expert_count", loses the prefix.
std::string config_of(const files::GgufFile& file, const std::string& label) {
  const nlohmann::json metadata = nlohmann::json::parse(file.metadata_json());
  const auto found = metadata.find("general.architecture");
  FUSEDMOE_CHECK_FILE(found != metadata.end() && found->is_string(),
                      label + ": general.architecture", "absent", "the name of an architecture");
  const std::string architecture = found->get<std::string>();
  nlohmann::json config{{"model_type", "gguf." + architecture}};
  for (const auto& [key, value] : metadata.items()) {
    if (!key.starts_with(architecture + ".")) continue;
    const std::string own = key.substr(architecture.size() + 1);
    if (own != "model_type" && own.find('.') == std::string::npos) config[own] = value;
  }
  return config.dump();
}

std::int64_t split_number(const files::GgufFile& file, const char* key, std::int64_t otherwise) {
  const nlohmann::json metadata = nlohmann::json::parse(file.metadata_json());
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
