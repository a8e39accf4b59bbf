// A small checkpoint in memory, correct for some family, scheme and layout and then damaged: an
// Error, or a layer of which every weight can be decoded.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/block_tensors.h"
#include "checkpoint/quant_config.h"
#include "files/safetensors_header.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/quant.h"
#include "fusedmoe/runtime.h"
#include "fusedmoe/tensor.h"

namespace {

using namespace fusedmoe;

/// Decisions from the fuzzer's bytes; zeros when they are used up.
class Source {
 public:
  Source(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}
  std::uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  std::int64_t below(std::int64_t limit) { return limit > 0 ? byte() % limit : 0; }
  bool empty() const { return left_ == 0; }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

constexpr DType kStored[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3, DType::kE8M0,
                             DType::kU8,  DType::kI8,   DType::kI32, DType::kI64};

nlohmann::json base_config(const checkpoint::FamilyRow& row, Source& source) {
  nlohmann::json config{{"model_type", row.name},
                        {"num_hidden_layers", 1},
                        {"hidden_size", 32 * (1 + source.below(2))},
                        {"num_local_experts", 1 + source.below(3)},
                        {"num_experts_per_tok", 1},
                        {"n_shared_experts", source.below(2)},
                        {"shared_expert_intermediate_size", 32 * source.below(2)},
                        {"n_group", 1},
                        {"topk_group", 1}};
  config[row.intermediate.keys.front()] = 32;
  if (source.below(4) == 3) config["expert_dtype"] = "fp4";
  if (source.below(4) == 3) {
    for (const char* key : {"swiglu_limit", "swiglu_limits", "expert_swiglu_limit_list",
                            "share_expert_swiglu_limit_list", "routed_scaling_factor"}) {
      if (source.below(2)) config[key] = {source.below(4), source.below(4)};
    }
  }
  return config;
}

/// What a correct checkpoint holds.
std::vector<files::HeaderEntry> correct_tensors(const ModelConfig& model,
                                                const checkpoint::FamilyRow& row, Source& source) {
  const auto& layout = row.layouts[static_cast<std::size_t>(
      source.below(static_cast<std::int64_t>(row.layouts.size())))];
  const auto storage_of = [&](const QuantScheme& scheme) -> checkpoint::LinearStorage {
    const auto rows = checkpoint::linear_layouts(model.layout, scheme.weights);
    if (rows.empty()) return {};
    return {rows[static_cast<std::size_t>(source.below(static_cast<std::int64_t>(rows.size())))],
            scheme};
  };
  checkpoint::BlockLayout names = checkpoint::published_names(model, layout);
  names.naming = source.below(2) ? checkpoint::Naming::kJoined : checkpoint::Naming::kShort;
  if (layout.storage != checkpoint::ExpertStorage::kMxfp4 &&
      layout.storage != checkpoint::ExpertStorage::kRows) {
    names.storage.experts = names.storage.down = storage_of(model.scheme);
  }
  if (source.below(2)) {
    names.storage.shared = names.storage.shared_down = storage_of(model.scheme);
  }
  std::vector<files::HeaderEntry> entries;
  for (const auto& spec : checkpoint::block_tensors(model, names)) {
    DType dtype = DType::kBF16;
    if (spec.stored) {
      dtype = spec.stored->dtypes[static_cast<std::size_t>(
          source.below(static_cast<std::int64_t>(spec.stored->dtypes.size())))];
    } else if (spec.role == checkpoint::TensorRole::kMxfp4Blocks ||
               spec.role == checkpoint::TensorRole::kMxfp4Scales) {
      dtype = DType::kU8;
    }
    if (!spec.required && source.below(2)) continue;
    entries.push_back({std::string(row.prefix) + "0." + spec.name, dtype, spec.shape, 0, 0});
    if (source.below(16) == 15 && spec.shape.rank() > 0) {
      const std::string module = spec.name.substr(0, spec.name.rfind('.'));
      entries.push_back(
          {std::string(row.prefix) + "0." + module + ".bias", DType::kF16, {spec.shape[0]}, 0, 0});
    }
  }
  return entries;
}

void damage(std::vector<files::HeaderEntry>& entries, Source& source) {
  if (entries.empty()) return;
  const auto at = static_cast<std::size_t>(source.below(256)) % entries.size();
  files::HeaderEntry& entry = entries[at];
  switch (source.below(6)) {
    case 0:
      entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    case 1:
      entry.dtype = kStored[source.below(std::size(kStored))];
      break;
    case 2:
      if (entry.shape.rank() > 0) entry.shape[0] = source.below(200);
      break;
    case 3:
      entry.shape = entry.shape.rank() == 1 ? Shape{} : Shape{source.below(64), source.below(64)};
      break;
    case 4:
      entry.name += static_cast<char>('0' + source.below(10));
      break;
    case 5:
      entries.push_back(entry);
      entries.back().name.insert(entries.back().name.size() / 2, ".experts");
      break;
  }
}

void damage_config(nlohmann::json& config, Source& source) {
  nlohmann::json& object =
      config.contains("quantization_config") ? config["quantization_config"] : config;
  if (object.empty()) return;
  auto at = object.begin();
  for (std::int64_t i = source.below(static_cast<std::int64_t>(object.size())); i > 0; --i) ++at;
  switch (source.below(4)) {
    case 0:
      object.erase(at);
      break;
    case 1:
      *at = source.below(256) - 128;
      break;
    case 2:
      *at = nlohmann::json::array({source.below(256)});
      break;
    case 3:
      *at = "nvfp4";
      break;
  }
}

std::vector<std::uint8_t> file_bytes(std::vector<files::HeaderEntry> entries,
                                     const std::string& config, Source& source) {
  std::int64_t total = 0;
  for (files::HeaderEntry& entry : entries) {
    entry.begin = total;
    total += bytes(entry.dtype, entry.shape.numel());
    entry.end = total;
  }
  const std::string header = files::serialize_header(entries, {{"config", config}});
  std::vector<std::uint8_t> file(header.begin(), header.end());
  // A short pattern repeated: scales are mostly sane where it is.
  std::uint8_t pattern[16];
  for (std::uint8_t& byte : pattern) byte = source.empty() ? 0x38 : source.byte();
  for (std::int64_t i = 0; i < total; ++i) file.push_back(pattern[i % 16]);
  return file;
}

void read_every_weight(const ExpertWeights& weights) {
  for (const ExpertMatrices& expert : weights.experts) {
    const QuantKey& key = weights.scheme.weights;
    dequantize_weights(expert.gate, key, weights.hidden);
    dequantize_weights(expert.up, key, weights.hidden);
    dequantize_weights(expert.down, key, weights.intermediate);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  set_num_threads(1);
  Source source(data, size);
  const auto families = checkpoint::family_table();
  const checkpoint::FamilyRow& row =
      *families[static_cast<std::size_t>(source.below(static_cast<std::int64_t>(families.size())))];
  if (!row.refused.empty()) return 0;
  const auto& named = named_schemes();
  const QuantScheme scheme = named[source.byte() % named.size()].scheme;
  const auto layout = static_cast<CheckpointLayout>(source.below(8));
  try {
    nlohmann::json config = base_config(row, source);
    if (auto quantization = checkpoint::quantization_config({layout, scheme}, {})) {
      config["quantization_config"] = *quantization;
    }
    const ModelConfig model = parse_model_config(config.dump());
    std::vector<files::HeaderEntry> entries = correct_tensors(model, row, source);
    for (std::int64_t i = source.below(4); i > 0; --i) damage(entries, source);
    if (source.below(4) == 3) damage_config(config, source);
    const std::vector<std::uint8_t> file = file_bytes(entries, config.dump(), source);
    const Checkpoint checkpoint = Checkpoint::parse(file.data(), file.size(), "input");
    for (const std::int64_t number : checkpoint.moe_layers()) {
      const LayerWeights layer = checkpoint.load_layer(number);
      read_every_weight(layer.experts);
      if (layer.shared_experts) read_every_weight(layer.shared_experts->weights);
    }
  } catch (const Error&) {
  }
  return 0;
}
