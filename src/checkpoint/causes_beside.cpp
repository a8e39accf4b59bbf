#include "checkpoint/causes_beside.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "checkpoint/layer_formats.h"
#include "checkpoint/named_formats.h"
#include "checkpoint/tensor_checks.h"

namespace fusedmoe::checkpoint {
namespace {

/// Layers of one kind, and what the config makes of them.
struct Modules {
  std::string_view words;
  TensorRole role;
  std::vector<LinearLayer> layers;
  std::vector<LinearStorage> said;  ///< of each
};

std::vector<Modules> modules_of(const ModelConfig& model, const BlockLayout& layout) {
  const BlockStorage& storage = layout.storage;
  std::vector<Modules> result;
  const auto add = [&](std::string_view words, TensorRole role, std::vector<LinearLayer> layers,
                       const LinearStorage& said) {
    if (layers.empty()) return;
    const std::vector<LinearStorage> each(layers.size(), said);
    result.push_back({words, role, std::move(layers), each});
  };
  if (model.shared_intermediate > 0) {
    std::vector<LinearLayer> layers = shared_layers(model, layout);
    add("shared experts", TensorRole::kSharedWeight, layers, storage.shared);
    result.back().said.back() = storage.shared_down;
    const LinearLayer down = layers.back();
    layers.pop_back();
    add("gate and up matrices of the shared experts", TensorRole::kSharedWeight, layers,
        storage.shared);
    if (layers.size() == 2) {
      add("gate matrices of the shared experts", TensorRole::kSharedWeight, {layers[0]},
          storage.shared);
      add("up matrices of the shared experts", TensorRole::kSharedWeight, {layers[1]},
          storage.shared);
    }
    add("down matrices of the shared experts", TensorRole::kSharedWeight, {down},
        storage.shared_down);
  }
  add("gates of the shared experts", TensorRole::kSharedGate, shared_gate_layer(model, layout),
      storage.shared_gate);
  add("latent projections", TensorRole::kLatentWeight, latent_layers(model, layout),
      storage.latent);
  return result;
}

/// Tensors of a layer that do not fit, missing ones and ones too many.
std::size_t count_misfits(const Block& block, const LinearLayer& layer, TensorRole role,
                          const LinearStorage& storage) {
  TensorChecks checks;
  std::size_t misfits = 0, claimed = 0;
  for (const TensorSpec& spec : linear_tensors(layer, storage, role)) {
    const auto found = block.tensors.find(spec.name);
    const bool there = found != block.tensors.end();
    claimed += there;
    misfits += there ? !checks.problem(spec, found->second).empty() : spec.required;
  }
  const std::string begin = layer.name + ".";
  std::size_t there = 0;
  for (auto at = block.tensors.lower_bound(begin);
       at != block.tensors.end() && at->first.starts_with(begin); ++at) {
    there += at->first != begin + "bias";
  }
  return misfits + there - claimed;
}

std::size_t count_misfits(const Block& block, const Modules& modules,
                          const std::vector<LinearStorage>& storages) {
  std::size_t misfits = 0;
  for (std::size_t i = 0; i < modules.layers.size(); ++i) {
    misfits += count_misfits(block, modules.layers[i], modules.role, storages[i]);
  }
  return misfits;
}

/// The format that all tensors of the layers fit.
std::optional<NamedFormat> format_of(const Block& block, const Modules& modules,
                                     const NamedFormat& like) {
  for (const NamedFormat& format : formats_like(like)) {
    for (const LinearLayout* layout : linear_layouts(format.layout, format.scheme.weights)) {
      const std::vector<LinearStorage> storages(modules.layers.size(), {layout, format.scheme});
      if (count_misfits(block, modules, storages) == 0) return format;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<BesideCause> cause_beside_experts(const ModelConfig& model, const Block& block) {
  const BlockLayout layout = find_layout(model, block);
  std::optional<LayerModules> rules;
  if (model.quantization) {
    rules.emplace(*model.quantization, family_row(model.family), block.prefix, layout);
  }
  BesideCause cause;
  std::vector<std::string> explained;  // layers
  for (const Modules& modules : modules_of(model, layout)) {
    const std::string& first = modules.layers.front().name;
    const bool known =
        std::any_of(modules.layers.begin(), modules.layers.end(), [&](const auto& layer) {
          return std::find(explained.begin(), explained.end(), layer.name) != explained.end();
        });
    const std::size_t misfits = count_misfits(block, modules, modules.said);
    if (misfits == 0 || known) continue;
    const ModuleFormat said = rules ? rules->beside(first) : ModuleFormat{};
    const auto found =
        format_of(block, modules, {model.layout, said.scheme.value_or(model.scheme)});
    if (!found || (said.scheme && found->layout == model.layout &&
                   found->scheme.weights == said.scheme->weights))
      continue;
    cause.text +=
        (cause.text.empty() ? "" : "; ") + contradiction(modules.words, said, model.layout, *found);
    cause.misfits += misfits;
    for (const LinearLayer& layer : modules.layers) explained.push_back(layer.name);
  }
  if (cause.text.empty()) return std::nullopt;
  return cause;
}

}  // namespace fusedmoe::checkpoint
