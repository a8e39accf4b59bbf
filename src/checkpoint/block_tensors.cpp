#include "checkpoint/block_tensors.h"

#include "core/check.h"

namespace fusedmoe::checkpoint {
namespace {

using enum ExpertStorage;

class TensorList {
 public:
  TensorList(const ModelConfig& model, const BlockLayout& layout)
      : model_(model), layout_(layout), gated_(family_row(model.family).gated) {}

  std::vector<TensorSpec> list() {
    const std::int64_t choices = model_.router.num_choices(), hidden = model_.hidden;
    add(layout_.router, {choices, hidden}, TensorRole::kRouterWeight, hidden);
    add(layout_.router_bias, {choices}, TensorRole::kRouterBias, hidden);
    add(layout_.correction_bias, {choices}, TensorRole::kCorrectionBias, hidden);
    add_experts();
    if (model_.shared_intermediate > 0) {
      for (const LinearLayer& layer : shared_layers(model_, layout_)) {
        add_linear(layer, layout_.storage.shared, TensorRole::kSharedWeight);
      }
    }
    for (const LinearLayer& layer : shared_gate_layer(model_, layout_)) {
      add_linear(layer, layout_.storage.shared_gate, TensorRole::kSharedGate);
    }
    for (const LinearLayer& layer : latent_layers(model_, layout_)) {
      add_linear(layer, layout_.storage.latent, TensorRole::kLatentWeight);
    }
    return std::move(specs_);
  }

 private:
  void add(const std::string& name, Shape shape, TensorRole role, std::int64_t fan_in) {
    if (!name.empty()) specs_.push_back({name, shape, role, fan_in});
  }
  void add_expert(const std::string& pattern, Shape shape, TensorRole role, std::int64_t fan_in) {
    if (!pattern.empty()) add(tensor_name(layout_.block, pattern), shape, role, fan_in);
  }
  void add_linear(const LinearLayer& layer, const LinearStorage& storage, TensorRole role) {
    for (TensorSpec& spec : linear_tensors(layer, storage, role)) {
      specs_.push_back(std::move(spec));
    }
  }

  void add_experts() {
    const std::int64_t experts = model_.router.num_experts, hidden = model_.experts_hidden(),
                       inner = model_.intermediate;
    const ExpertLayout& layout = *layout_.experts;
    const std::int64_t first = gated_ && layout.w3.empty() ? 2 * inner : inner;
    const TensorRole role = TensorRole::kExpertWeight;
    switch (layout.storage) {
      case kPerExpert:
        for (std::int64_t e = 0; e < experts; ++e) add_one_expert(e);
        break;
      case kStacked:
        add_expert(layout.w1, {experts, first, hidden}, role, hidden);
        add_expert(layout.w3, {experts, first, hidden}, role, hidden);
        add_expert(layout.w2, {experts, hidden, inner}, role, inner);
        break;
      case kStackedTransposed:
        add_expert(layout.w1, {experts, hidden, first}, role, hidden);
        add_expert(layout.w3, {experts, hidden, first}, role, hidden);
        add_expert(layout.w2, {experts, inner, hidden}, role, inner);
        break;
      case kRows:
        add_expert(layout.w1, {experts * inner, hidden}, role, hidden);
        add_expert(layout.w3, {experts * inner, hidden}, role, hidden);
        add_expert(layout.w2, {experts * inner, hidden}, role, inner);
        break;
      case kMxfp4:
        add_mxfp4(layout);
        break;
    }
    add_expert(layout.w13_bias, {experts, first}, TensorRole::kExpertBias, hidden);
    add_expert(layout.w3_bias, {experts, first}, TensorRole::kExpertBias, hidden);
    add_expert(layout.w2_bias, {experts, hidden}, TensorRole::kExpertBias, inner);
  }

  void add_one_expert(std::int64_t expert) {
    for (const LinearLayer& layer : expert_layers(model_, layout_, expert)) {
      add_linear(layer, layout_.storage.experts, TensorRole::kExpertWeight);
      if (!model_.has_bias) continue;
      add(layer.name + ".bias", {layer.shape.out}, TensorRole::kExpertBias, layer.shape.in);
    }
  }

  void add_mxfp4(const ExpertLayout& layout) {
    constexpr std::int64_t kBlock = 32;
    const std::int64_t experts = model_.router.num_experts, hidden = model_.experts_hidden(),
                       inner = model_.intermediate;
    FUSEDMOE_CHECK_FILE(hidden % kBlock == 0 && inner % kBlock == 0, "config",
                        core::format("hidden_size {} and expert width {}", hidden, inner),
                        "multiples of 32 for MXFP4");
    add_expert(layout.w1, {experts, 2 * inner, hidden / kBlock, kBlock / 2},
               TensorRole::kMxfp4Blocks, hidden);
    add_expert(layout.w13_scales, {experts, 2 * inner, hidden / kBlock}, TensorRole::kMxfp4Scales,
               hidden);
    add_expert(layout.w2, {experts, hidden, inner / kBlock, kBlock / 2}, TensorRole::kMxfp4Blocks,
               inner);
    add_expert(layout.w2_scales, {experts, hidden, inner / kBlock}, TensorRole::kMxfp4Scales,
               inner);
  }

  const ModelConfig& model_;
  const BlockLayout& layout_;
  const bool gated_;
  std::vector<TensorSpec> specs_;
};

}  // namespace

std::string tensor_name(std::string_view block, std::string_view pattern, std::int64_t expert) {
  std::string result;
  if (pattern.starts_with('/')) {
    pattern.remove_prefix(1);
  } else if (!block.empty()) {
    result = core::format("{}.", block);
  }
  for (const char c : pattern) {
    if (c == '*') {
      result += core::to_string(expert);
    } else {
      result += c;
    }
  }
  return result;
}

BlockLayout published_names(const ModelConfig& model, const ExpertLayout& experts) {
  const FamilyRow& row = family_row(model.family);
  BlockLayout layout;
  layout.block = row.blocks.front();
  layout.experts = &experts;
  const auto first = [&](const std::vector<std::string>& names, bool present) {
    return present && !names.empty() ? tensor_name(layout.block, names.front()) : std::string();
  };
  layout.router = first(row.router, true);
  layout.router_bias = first(row.router_bias, model.has_router_bias);
  layout.correction_bias = first(row.correction_bias, model.has_correction_bias);
  layout.shared_gate = first(row.shared_gate, model.shared_expert_gate);
  layout.latent_down = first(row.latent_down, model.latent > 0);
  layout.latent_up = first(row.latent_up, model.latent > 0);
  if (model.shared_intermediate > 0) {
    const SharedNames& names = row.shared.front();
    layout.shared.gate = tensor_name(layout.block, names.gate);
    if (!names.up.empty()) layout.shared.up = tensor_name(layout.block, names.up);
    layout.shared.down = tensor_name(layout.block, names.down);
  }
  return layout;
}

BlockLayout published_layout(const ModelConfig& model) {
  const bool mxfp4 = model.layout == CheckpointLayout::kGptOss;
  const FamilyRow& row = family_row(model.family);
  for (const ExpertLayout& layout : row.layouts) {
    if ((layout.storage == kMxfp4) == mxfp4) return published_names(model, layout);
  }
  throw Error::unsupported(Reason::kQuantScheme, "scheme", name(model.scheme),
                           core::format("one that {} is published in", row.name));
}

std::vector<LinearLayer> expert_layers(const ModelConfig& model, const BlockLayout& layout,
                                       std::int64_t expert) {
  const std::int64_t hidden = model.experts_hidden(), inner = model.intermediate;
  const ExpertLayout& names = *layout.experts;
  std::vector<LinearLayer> layers;
  layers.push_back({tensor_name(layout.block, names.w1, expert), {inner, hidden}});
  if (!names.w3.empty()) {
    layers.push_back({tensor_name(layout.block, names.w3, expert), {inner, hidden}});
  }
  layers.push_back({tensor_name(layout.block, names.w2, expert), {hidden, inner}});
  return layers;
}

std::vector<LinearLayer> shared_layers(const ModelConfig& model, const BlockLayout& layout) {
  const std::int64_t hidden = model.hidden, inner = model.shared_intermediate;
  const bool fused = layout.shared.up.empty() && family_row(model.family).gated;
  std::vector<LinearLayer> layers{{layout.shared.gate, {fused ? 2 * inner : inner, hidden}}};
  if (!layout.shared.up.empty()) layers.push_back({layout.shared.up, {inner, hidden}});
  layers.push_back({layout.shared.down, {hidden, inner}});
  return layers;
}

std::vector<LinearLayer> shared_gate_layer(const ModelConfig& model, const BlockLayout& layout) {
  if (layout.shared_gate.empty()) return {};
  return {{layout.shared_gate.substr(0, layout.shared_gate.rfind(".weight")), {1, model.hidden}}};
}

std::vector<LinearLayer> latent_layers(const ModelConfig& model, const BlockLayout& layout) {
  if (model.latent == 0) return {};
  return {{layout.latent_down, {model.latent, model.hidden}},
          {layout.latent_up, {model.hidden, model.latent}}};
}

std::vector<TensorSpec> linear_tensors(const LinearLayer& layer, const LinearStorage& storage,
                                       TensorRole role) {
  const auto [out, in] = layer.shape;
  if (!storage) return {{layer.name + ".weight", {out, in}, role, in}};
  std::vector<TensorSpec> specs;
  for (const StoredTensor& part : storage.layout->tensors) {
    if (!is_allowed(part, storage.scheme)) continue;
    specs.push_back({layer.name + std::string(part.suffix),
                     stored_shape(part, storage.scheme.weights, layer.shape),
                     TensorRole::kQuantized, in, &part, is_required(part, storage.scheme)});
  }
  return specs;
}

std::vector<TensorSpec> block_tensors(const ModelConfig& model, const BlockLayout& layout) {
  return TensorList(model, layout).list();
}

}  // namespace fusedmoe::checkpoint
