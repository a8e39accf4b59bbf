#include "checkpoint/block_schemes.h"

#include <vector>

#include "checkpoint/find_layout.h"
#include "checkpoint/stacked_experts.h"
#include "core/check.h"

namespace fusedmoe::checkpoint {
namespace {

const BlockTensor& weight_of(const Block& block, const LinearLayer& layer) {
  return block.tensors.find(part_name(layer, ".weight"))->second;
}

/// By the formats of gate, up and down, or of the first and the last.
QuantScheme scheme_of_layers(const Block& block, const std::vector<LinearLayer>& layers) {
  if (layers.size() == 3) {
    check_same_format(weight_of(block, layers[0]), weight_of(block, layers[1]), layers[1].name);
  }
  return *scheme_of_tensors(block, part_name(layers.front(), ".weight"),
                            part_name(layers.back(), ".weight"));
}

}  // namespace

QuantScheme scheme_of_experts(const ModelConfig& model, const BlockLayout& layout,
                              const Block& block, std::optional<DType> plain) {
  const ExpertStorage storage = layout.experts->storage;
  if (storage == ExpertStorage::kMxfp4) return mxfp4_scheme(layout);
  if (is_quantized(layout.storage)) {
    return per_expert_scheme(layout.storage, plain.value_or(DType::kBF16));
  }
  const QuantScheme scheme = scheme_of_layers(block, expert_layers(model, layout, 0));
  if (storage != ExpertStorage::kPerExpert) return scheme;
  for (std::int64_t e = 1; e < model.router.num_experts; ++e) {
    const std::vector<LinearLayer> layers = expert_layers(model, layout, e);
    const QuantScheme own = scheme_of_layers(block, layers);
    if (own == scheme) continue;
    throw Error::unsupported(
        Reason::kQuantScheme, layers.front().name,
        core::format("{} is {}, but expert 0 is {}: the experts of a layer must have one format",
                     layers.front().name, name(own), name(scheme)));
  }
  return scheme;
}

std::optional<QuantScheme> scheme_of_shared_experts(const ModelConfig& model,
                                                    const BlockLayout& layout, const Block& block) {
  if (model.shared_intermediate == 0) return std::nullopt;
  const std::vector<LinearLayer> layers = shared_layers(model, layout);
  const LinearStorage &first = layout.storage.shared, &last = layout.storage.shared_down;
  if (!first && !last) return scheme_of_layers(block, layers);
  const auto scheme_of = [&](const LinearStorage& storage, const LinearLayer& layer) {
    if (storage) return storage.scheme;
    return QuantScheme{*key_of(weight_of(block, layer)), std::nullopt};
  };
  QuantScheme scheme = scheme_of(first, layers.front());
  const QuantKey down = scheme_of(last, layers.back()).weights;
  if (down != scheme.weights) scheme.down = down;
  return scheme;
}

}  // namespace fusedmoe::checkpoint
