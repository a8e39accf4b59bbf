// Damaged headers and configs of every model family and of GGUF: an Error, or a layer whose every
// number can be decoded; and the layer that was stored, unless config or dtypes say another one.
// FUSEDMOE_MUTATIONS is the number of damaged files (default: a few hundred).
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "fusedmoe/checkpoint.h"
#include "fusedmoe/quant.h"
#include "gtest/gtest.h"
#include "testing/cases.h"

namespace fusedmoe::mutations_test {

using testing::Random;

/// Hash of a layer's numbers as stored, and of their dtypes.
class Fingerprint {
 public:
  void add(const TensorView& view) {
    if (!view) return;
    add_bytes(static_cast<std::uint64_t>(view.dtype()));
    const int rank = view.rank();
    const std::int64_t rows = rank > 1 ? view.size(0) : 1, columns = view.size(rank - 1);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        const std::int64_t at = (rank > 1 ? r * view.stride(0) : 0) + c * view.stride(rank - 1);
        add_bytes(view.as<const std::uint8_t>()[at * bytes(view.dtype(), 1)]);
      }
    }
  }
  void add(const WeightMatrix& matrix) {
    for (const TensorView* part : {&matrix.values, &matrix.scales, &matrix.zero_points,
                                   &matrix.global_scale, &matrix.bias}) {
      add(*part);
    }
  }
  void add(const ExpertWeights& weights) {
    for (const ExpertMatrices& expert : weights.experts) {
      add(expert.gate);
      add(expert.up);
      add(expert.down);
    }
  }
  std::uint64_t value() const { return value_; }

 private:
  void add_bytes(std::uint64_t value) { value_ = (value_ ^ value) * 0x100000001B3; }
  std::uint64_t value_ = 0xCBF29CE484222325;
};

std::uint64_t fingerprint(const LayerWeights& layer) {
  Fingerprint result;
  result.add(layer.router_weights.weight);
  result.add(layer.router_weights.bias);
  result.add(layer.experts);
  if (layer.shared_experts) result.add(layer.shared_experts->weights);
  if (layer.latent) {
    result.add(layer.latent->down);
    result.add(layer.latent->up);
  }
  return result.value();
}

/// What the config says of the layer: another one may have other numbers.
std::string description(const ModelConfig& model) {
  std::string text(model.family.name());
  for (const std::int64_t number :
       {model.hidden, model.intermediate, model.latent, model.shared_intermediate,
        model.router.num_experts, model.router.num_zero_experts}) {
    text += " " + std::to_string(number);
  }
  return text + " " + name(model.scheme) + " " + std::string(name(model.layout));
}

/// Dtypes of the block's tensors, their names, and where these stand: two that exchange their names
/// make another layer.
std::string tensors_of(const Checkpoint& checkpoint, std::int64_t layer, const std::string& bytes) {
  std::string text;
  for (const auto& tensor : checkpoint.layer_tensors(layer)) {
    text += tensor.name + tensor.format + to_string(tensor.shape) + " " +
            std::to_string(bytes.find(tensor.name + '"')) + " ";
  }
  return text;
}

/// Decodes every weight once.
void decode(const ExpertWeights& weights) {
  for (const ExpertMatrices& expert : weights.experts) {
    dequantize_weights(expert.gate, weights.scheme.weights, weights.hidden);
    if (expert.up.values) dequantize_weights(expert.up, weights.scheme.weights, weights.hidden);
    dequantize_weights(expert.down, weights.scheme.down_weights(), weights.intermediate);
  }
}

/// What a layer was stored as.
struct Stored {
  std::string config, tensors;
  std::uint64_t fingerprint;
};

struct File {
  std::string name, bytes;
  std::size_t end;  ///< of the header
  std::map<std::int64_t, Stored> layers;
};

std::size_t header_end(const std::string& bytes) {
  // The last tensor: its name, its rank of 2, two extents, type and offset.
  if (bytes.starts_with("GGUF")) return bytes.find("check.output") + 12 + 4 + 16 + 4 + 8;
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  return 8 + length;
}

std::vector<File> vectors() {
  std::vector<File> files;
  for (const char* directory :
       {FUSEDMOE_FAMILIES_DIR, FUSEDMOE_GGUF_DIR, FUSEDMOE_TOOLS_DIR, FUSEDMOE_FORMS_DIR}) {
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      if (entry.path().stem() == "blocks") continue;
      std::ifstream stream(entry.path(), std::ios::binary);
      File file{entry.path().stem(), {std::istreambuf_iterator<char>(stream), {}}, 0, {}};
      file.end = std::min(header_end(file.bytes), file.bytes.size());
      const Checkpoint checkpoint =
          Checkpoint::parse(file.bytes.data(), file.bytes.size(), file.name);
      for (const std::int64_t layer : checkpoint.moe_layers()) {
        file.layers[layer] = {description(checkpoint.config(layer)),
                              tensors_of(checkpoint, layer, file.bytes),
                              fingerprint(checkpoint.load_layer(layer))};
      }
      files.push_back(std::move(file));
    }
  }
  return files;
}

/// Changes the header in one to three places; mostly without changing its length.
void damage(const File& file, Random& random, std::string& bytes) {
  constexpr std::string_view kTokens[] = {
      "0",   "1",    "null", "\"",   "{", "[", "-1", "18446744073709551615",
      "1e9", "true", "\\u0", "\xFF", ",", "}", "]",  "4294967296"};
  for (std::uint64_t i = 0, count = 1 + random.below(3); i < count; ++i) {
    const std::size_t at = random.below(file.end);
    switch (random.below(9)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.below(8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(random.below(256));
        break;
      case 2:
      case 3:
      case 4: {  // digits: what stays JSON, and another number
        const std::size_t digit = bytes.find_first_of("0123456789", at);
        if (digit < file.end) bytes[digit] = static_cast<char>('0' + random.below(10));
        break;
      }
      case 5:
        std::swap(bytes[at], bytes[random.below(file.end)]);
        break;
      case 6: {
        const std::string_view token = kTokens[random.below(std::size(kTokens))];
        bytes.replace(at, std::min(token.size(), file.end - at), token.substr(0, file.end - at));
        break;
      }
      default:
        std::memset(bytes.data() + at, static_cast<int>(random.below(2) * 255),
                    std::min<std::size_t>(8, file.end - at));
    }
  }
}

TEST(MutationsTest, AreErrorsOrTheStoredLayer) {
  const char* given = std::getenv("FUSEDMOE_MUTATIONS");
  const int count = given ? std::atoi(given) : 400;
  const std::vector<File> files = vectors();
  ASSERT_GT(files.size(), 60u);
  Random random(given ? static_cast<std::uint64_t>(count) : 1);
  std::map<std::string, int> outcomes;
  for (int i = 0; i < count; ++i) {
    const File& file = files[static_cast<std::size_t>(i) % files.size()];
    std::string bytes = file.bytes;
    damage(file, random, bytes);
    try {
      const Checkpoint checkpoint = Checkpoint::parse(bytes.data(), bytes.size(), file.name);
      for (const std::int64_t number : checkpoint.moe_layers()) {
        const LayerWeights layer = checkpoint.load_layer(number);
        decode(layer.experts);
        if (layer.shared_experts) decode(layer.shared_experts->weights);
        const auto stored = file.layers.find(number);
        const bool same = stored != file.layers.end() &&
                          description(checkpoint.config(number)) == stored->second.config &&
                          tensors_of(checkpoint, number, bytes) == stored->second.tensors;
        ++outcomes[same ? "the same layer" : "another layer"];
        EXPECT_TRUE(!same || fingerprint(layer) == stored->second.fingerprint)
            << file.name << " " << i << " layer " << number;
      }
    } catch (const Error&) {
      ++outcomes["error"];
    }
  }
  EXPECT_GT(outcomes["error"], 0);
  EXPECT_GT(outcomes["the same layer"], 0);
  for (const auto& [what, times] : outcomes) RecordProperty(what.substr(0, 4), times);
}

}  // namespace fusedmoe::mutations_test
