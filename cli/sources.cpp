#include "sources.h"

#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/problems.h"
#include "fusedmoe/safetensors.h"
#include "testing/cases.h"

namespace fusedmoe::cli {
namespace {

/// A floating tensor (any number of rows, columns) of a safetensors file; throws Error.
Tensor load_tensor(const std::string& path, const std::string& name, std::int64_t columns) {
  Tensor tensor = SafetensorsFile::open(path).tensor(name);
  const std::string what = fmt::format("{} of {}", name, path);
  if (tensor.rank() != 2 || tensor.size(1) != columns) {
    throw Error(what, to_string(tensor.shape()), fmt::format("[num_tokens, {}]", columns));
  }
  const DType dtype = tensor.dtype();
  if (dtype != DType::kF64 && dtype != DType::kF32 && dtype != DType::kF16 &&
      dtype != DType::kBF16) {
    throw Error(what, std::string(fusedmoe::name(dtype)), "f32, bf16, f16 or f64");
  }
  return tensor;
}

}  // namespace

Option add_family_option(Command& command, std::string& family) {
  return command.add_option(
      "--family", family, "FAMILY",
      "Read the model as one of this family: a name that families lists, or a JSON "
      "file with a description");
}

Option add_layer_option(Command& command, std::int64_t& layer, const std::string& help) {
  return command.add_option("--layer", layer, "N", help).not_negative();
}

Checkpoint open_checkpoint(const std::string& path, const std::string& family) {
  CheckpointOptions options;
  if (!family.empty()) options.family = Family::named(family);
  return Checkpoint::open(path, options);
}

std::vector<std::int64_t> moe_layers_of(const Checkpoint& checkpoint, const std::string& path) {
  std::vector<std::int64_t> layers = checkpoint.moe_layers();
  if (layers.empty())
    throw Error::invalid(
        path,
        fmt::format("{} has no MoE layers: none of its files holds a tensor of an expert", path));
  return layers;
}

std::int64_t chosen_layer(std::int64_t layer, const std::vector<std::int64_t>& layers) {
  if (layer < 0) return layers.front();
  if (std::find(layers.begin(), layers.end(), layer) != layers.end()) return layer;
  throw Error("--layer", fmt::to_string(layer),
              fmt::format("a layer with experts: {}", checkpoint::number_ranges(layers)));
}

Command LayerSource::add_to(Command& command, const std::string& model_help,
                            const std::string& layer_help) {
  Command group = command.add_group(1, 1);
  group.add_option("--checkpoint", checkpoint, "PATH", "Checkpoint directory or file");
  const Option named =
      group.add_option("--model", model, "MODEL", model_help).one_of(model_preset_names());
  add_family_option(command, family).excludes(named);
  add_layer_option(command, layer, layer_help).excludes(named);
  return group;
}

Option InputSource::add_to(Command& command, std::int64_t least_tokens) {
  const Option input =
      command.add_option("--input", path, "PATH",
                         "Safetensors file with the hidden states; default: random "
                         "ones");
  command.add_option("--input-name", name, "NAME", "Name of the tensor in that file")
      .show_default()
      .needs(input);
  command.add_option("--tokens", num_tokens, "N", "Number of random hidden states")
      .between(least_tokens, std::int64_t{1} << 20)
      .show_default()
      .excludes(input);
  return input;
}

Tensor InputSource::load(std::int64_t hidden, DType dtype) const {
  if (!path.empty()) {
    const Tensor stored = load_tensor(path, name, hidden);
    Tensor x = Tensor::empty(stored.shape(), dtype);
    convert(stored, x);
    return x;
  }
  Tensor x = Tensor::empty({num_tokens, hidden}, dtype);
  testing::Random random(seed + 2);  // layers of random weights take the seed itself
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    store_f32(x.data(), dtype, i, static_cast<float>(random.normal()));
  }
  return x;
}

}  // namespace fusedmoe::cli
