// Synthetic checkpoints: plans every tensor, then streams random values.
//
// Weights ~ N(0, 1 / fan-in), so that outputs are of order one; router weights 1.5 times that, for
// a visible preference. MXFP4: uniform random codes (rms 2.93) with scales 2^e, where e varies by
// one from block to block (rms factor 1.25): the 2^e nearest to 1 / (3.66 sqrt(fan-in)).
#include "tools/synth.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numbers>

#include "checkpoint/block_tensors.h"
#include "checkpoint/checkpoint_files.h"
#include "checkpoint/checkpoint_writer.h"
#include "core/check.h"
#include "files/file.h"
#include "files/json.h"
#include "fusedmoe/checkpoint.h"
#include "fusedmoe/quant.h"

namespace fusedmoe {
namespace {

namespace fs = std::filesystem;
using checkpoint::TensorRole;

// SplitMix64: one multiply-xorshift chain per 8 bytes, and any seed is a good one.
class RandomBits {
 public:
  explicit RandomBits(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t state_;
};

constexpr std::size_t kTableSize = std::size_t{1} << 16;

// 2^16 draws of N(0, 1); mean 0 exactly, because every value is there with both signs.
const std::vector<float>& normal_table() {
  static const std::vector<float> table = [] {
    RandomBits random(1);
    const auto uniform = [&] { return (static_cast<double>(random.next() >> 11) + 0.5) * 0x1p-53; };
    std::vector<float> values(kTableSize);
    for (std::size_t i = 0; i < kTableSize; i += 4) {
      const double radius = std::sqrt(-2 * std::log(uniform()));
      const double angle = 2 * std::numbers::pi * uniform();
      values[i] = static_cast<float>(radius * std::cos(angle));
      values[i + 1] = static_cast<float>(radius * std::sin(angle));
      values[i + 2] = -values[i];
      values[i + 3] = -values[i + 1];
    }
    return values;
  }();
  return table;
}

// Random contents for tensors, a buffer at a time.
class Filler {
 public:
  void begin(const checkpoint::TensorSpec& spec, std::uint64_t seed) {
    random_ = RandomBits(seed);
    role_ = spec.role;
    const double fan_in = static_cast<double>(spec.fan_in);
    constexpr double kSmall = 0.05;
    constexpr double kRms = 2.93 * 1.25;  // of code times scale, in units of 2^e
    switch (role_) {
      case TensorRole::kMxfp4Blocks:
      case TensorRole::kQuantized:
        return;
      case TensorRole::kMxfp4Scales:
        scale_code_ =
            static_cast<std::uint8_t>(std::lround(127 - std::log2(kRms * std::sqrt(fan_in))));
        return;
      case TensorRole::kRouterWeight:
        return begin_normal(1.5 / std::sqrt(fan_in));
      case TensorRole::kExpertWeight:
      case TensorRole::kSharedWeight:
      case TensorRole::kSharedGate:
      case TensorRole::kLatentWeight:
        return begin_normal(1 / std::sqrt(fan_in));
      case TensorRole::kRouterBias:
      case TensorRole::kCorrectionBias:
      case TensorRole::kExpertBias:
        return begin_normal(kSmall);
    }
  }

  void fill(std::span<std::uint64_t> words) {
    switch (role_) {
      case TensorRole::kMxfp4Blocks:
        for (std::uint64_t& word : words) word = random_.next();
        return;
      case TensorRole::kMxfp4Scales:
        for (std::uint64_t& word : words) word = scales(random_.next());
        return;
      case TensorRole::kCorrectionBias:
        for (std::uint64_t& word : words) word = two_f32(random_.next());
        return;
      default: {
        const std::uint16_t* table = table_.data();
        for (std::uint64_t& word : words) {
          const std::uint64_t bits = random_.next();
          word = table[bits & 0xffff] | std::uint64_t{table[bits >> 16 & 0xffff]} << 16 |
                 std::uint64_t{table[bits >> 32 & 0xffff]} << 32 |
                 std::uint64_t{table[bits >> 48]} << 48;
        }
      }
    }
  }

 private:
  void begin_normal(double sigma) {
    if (sigma == sigma_) return;
    sigma_ = sigma;
    table_.resize(kTableSize);
    for (std::size_t i = 0; i < kTableSize; ++i) {
      table_[i] = f32_to_bf16(static_cast<float>(sigma * normal_table()[i]));
    }
  }

  std::uint64_t scales(std::uint64_t bits) const {
    std::uint64_t codes = 0;
    for (int shift = 0; shift < 64; shift += 8) {
      const unsigned draw = bits >> shift & 3;  // 0: one less, 3: one more
      const unsigned code = scale_code_ + (draw == 3) - (draw == 0);
      codes |= std::uint64_t{code} << shift;
    }
    return codes;
  }

  std::uint64_t two_f32(std::uint64_t bits) const {
    std::array<float, 2> values;
    for (std::size_t i = 0; i < 2; ++i) {
      values[i] = static_cast<float>(sigma_) * normal_table()[bits >> (16 * i) & 0xffff];
    }
    std::uint64_t word = 0;
    std::memcpy(&word, values.data(), sizeof word);
    return word;
  }

  RandomBits random_{0};
  TensorRole role_ = TensorRole::kExpertWeight;
  unsigned scale_code_ = 0;
  double sigma_ = 0;
  std::vector<std::uint16_t> table_;
};

DType published_dtype(TensorRole role) {
  if (role == TensorRole::kMxfp4Blocks || role == TensorRole::kMxfp4Scales) return DType::kU8;
  return role == TensorRole::kCorrectionBias ? DType::kF32 : DType::kBF16;
}

std::vector<checkpoint::TensorSpec> all_tensors(const ModelConfig& model, std::int64_t num_layers) {
  const checkpoint::FamilyRow& row = checkpoint::family_row(model.family);
  const std::vector<checkpoint::TensorSpec> block =
      checkpoint::block_tensors(model, checkpoint::published_layout(model));
  std::vector<checkpoint::TensorSpec> tensors;
  for (std::int64_t layer = 0; layer < num_layers; ++layer) {
    for (checkpoint::TensorSpec spec : block) {
      spec.name = core::format("{}{}.{}", row.prefix, layer, spec.name);
      tensors.push_back(std::move(spec));
    }
  }
  return tensors;
}

std::vector<checkpoint::PlannedTensor> planned(const std::vector<checkpoint::TensorSpec>& specs) {
  std::vector<checkpoint::PlannedTensor> tensors;
  tensors.reserve(specs.size());
  for (const checkpoint::TensorSpec& spec : specs) {
    tensors.push_back({spec.name, published_dtype(spec.role), spec.shape});
  }
  return tensors;
}

/// The object that holds the language model's keys.
nlohmann::json& language_model(nlohmann::json& root, const checkpoint::FamilyRow& row) {
  for (const std::string_view path :
       {std::string_view(row.config), std::string_view("text_config")}) {
    std::string pointer = "/" + std::string(path);
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    const nlohmann::json::json_pointer place(pointer);
    if (!path.empty() && root.contains(place) && root[place].is_object()) return root[place];
  }
  return root;
}

// The config of what is really written: as many layers, none of them dense, bf16 or MXFP4.
std::string written_config(const SynthOptions& options, const ModelConfig& model) {
  nlohmann::json root =
      files::parse_json_object(options.config_json, files::kMaxConfigBytes, "config_json");
  const checkpoint::FamilyRow& row = checkpoint::family_row(model.family);
  nlohmann::json& node = language_model(root, row);
  node[row.num_layers.keys.empty() ? "num_hidden_layers" : row.num_layers.keys.front()] =
      options.num_layers;
  const auto change = [&](const std::string& key, const nlohmann::json& value) {
    for (nlohmann::json* object : {&root, &node}) {
      if (object->contains(key)) (*object)[key] = value;
    }
  };
  for (const auto& [key, value] : row.every_layer) change(key, nlohmann::json::parse(value));
  change("torch_dtype", "bfloat16");
  change("dtype", "bfloat16");
  node.erase("moe_layers");
  if (model.layout != CheckpointLayout::kGptOss) {
    root.erase("quantization_config");
    node.erase("quantization_config");
  }
  return root.dump(2) + "\n";
}

std::uint64_t hash(std::string_view text, std::uint64_t seed) {
  RandomBits mixed(seed);
  std::uint64_t value = mixed.next();
  for (const char c : text) {
    value = RandomBits(value ^ static_cast<unsigned char>(c)).next();
  }
  return value;
}

void write_random(const std::vector<checkpoint::TensorSpec>& specs, std::uint64_t seed,
                  checkpoint::CheckpointWriter& writer) {
  constexpr std::int64_t kBufferBytes = std::int64_t{1} << 20;
  Filler filler;
  std::vector<std::uint64_t> buffer(kBufferBytes / sizeof(std::uint64_t));
  for (const checkpoint::TensorSpec& spec : specs) {
    filler.begin(spec, hash(spec.name, seed));
    const std::int64_t total = bytes(published_dtype(spec.role), spec.shape.numel());
    for (std::int64_t offset = 0; offset < total; offset += kBufferBytes) {
      const auto size = static_cast<std::size_t>(std::min(kBufferBytes, total - offset));
      filler.fill({buffer.data(), (size + 7) / 8});
      writer.write(spec.name, offset, buffer.data(), size);
    }
  }
}

}  // namespace

std::int64_t synthesize_checkpoint(const SynthOptions& options, const fs::path& directory) {
  constexpr std::int64_t kMaxLayers = 1024, kMaxTokens = std::int64_t{1} << 20;
  FUSEDMOE_CHECK(options.num_layers >= 1 && options.num_layers <= kMaxLayers, "num_layers",
                 core::to_string(options.num_layers), core::format("from 1 to {}", kMaxLayers));
  FUSEDMOE_CHECK(options.num_tokens >= 0 && options.num_tokens <= kMaxTokens, "num_tokens",
                 core::to_string(options.num_tokens), core::format("from 0 to {}", kMaxTokens));
  FUSEDMOE_CHECK(options.max_shard_bytes >= 1, "max_shard_bytes",
                 core::to_string(options.max_shard_bytes), "positive");
  FUSEDMOE_CHECK(!directory.empty(), "directory", "empty", "a path");
  ModelConfig model = parse_model_config(options.config_json);
  if (model.layout != CheckpointLayout::kGptOss) {
    model.scheme = schemes::unquantized(DType::kBF16);
    model.layout = CheckpointLayout::kPlain;
  }

  const std::vector<checkpoint::TensorSpec> weights = all_tensors(model, options.num_layers);
  // Fan-in 1 makes it N(0, 1).
  const std::vector<checkpoint::TensorSpec> input{
      {"hidden_states", {options.num_tokens, model.hidden}, TensorRole::kExpertWeight, 1}};
  const std::vector<checkpoint::PlannedFile> shards =
      checkpoint::plan_shards(planned(weights), options.max_shard_bytes);
  std::vector<checkpoint::PlannedFile> files = shards;
  files.emplace_back("input.safetensors", planned(input));
  try {
    checkpoint::CheckpointWriter writer(directory, files, options.progress);
    write_random(weights, options.seed, writer);
    write_random(input, options.seed, writer);
    if (shards.size() > 1)
      writer.write_file(checkpoint::kIndexName, checkpoint::index_json(shards));
    writer.write_file("config.json", written_config(options, model));
    return writer.commit();
  } catch (const fs::filesystem_error& error) {
    files::fail_system(directory, "write", error);
  }
}

}  // namespace fusedmoe
