#include "checkpoint/block_tensors.h"

#include "checkpoint/linear_codec.h"
#include "core/check.h"

namespace fusedmoe::checkpoint {
namespace {

using enum ExpertStorage;

class TensorList {
 public:
  TensorList(const ModelConfig& model, const BlockLayout& layout)
      : model_(model), layout_(layout) {}

  std::vector<TensorSpec> list() {
    const std::int64_t choices = model_.router.num_choices(), hidden = model_.hidden;
    add(layout_.router, {choices, hidden}, TensorRole::kRouterWeight, hidden);
    add(layout_.router_bias, {choices}, TensorRole::kRouterBias, hidden);
    add(layout_.correction_bias, {choices}, TensorRole::kCorrectionBias, hidden);
    add_experts();
    if (model_.shared_intermediate > 0) {
      const std::vector<LinearLayer> layers = shared_layers(model_, layout_);
      for (const LinearLayer& layer : layers) {
        const bool down = &layer == &layers.back();
        add_linear(layer, down ? layout_.storage.shared_down : layout_.storage.shared,
                   TensorRole::kSharedWeight);
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
    const ExpertLayout& layout = *layout_.experts;
    if (layout.storage == kMxfp4) return add_mxfp4(layout);
    const std::int64_t count = layout.storage == kPerExpert ? model_.router.num_experts : 1;
    for (std::int64_t e = 0; e < count; ++e) {
      const std::vector<LinearLayer> layers = expert_layers(model_, layout_, e);
      for (const LinearLayer& layer : layers) {
        const bool down = &layer == &layers.back();
        add_linear(layer, down ? layout_.storage.down : layout_.storage.experts,
                   TensorRole::kExpertWeight);
        const Shape bias{layer.shape.out};
        add(layer.bias, layer.experts > 0 ? Shape{layer.experts, layer.shape.out} : bias,
            TensorRole::kExpertBias, layer.shape.in);
      }
    }
  }

  void add_mxfp4(const ExpertLayout& layout) {
    constexpr std::int64_t kBlock = 32;
    const std::int64_t experts = model_.router.num_experts, hidden = model_.experts_hidden(),
                       inner = model_.intermediate;
    FUSEDMOE_CHECK_IO(
        hidden % kBlock == 0 && inner % kBlock == 0, "config",
        core::format("config says that experts in MXFP4 are {} x {}, but both sizes of "
                     "such experts are multiples of {}",
                     hidden, inner, kBlock));
    add_expert(layout.w1, {experts, 2 * inner, hidden / kBlock, kBlock / 2},
               TensorRole::kMxfp4Blocks, hidden);
    add_expert(layout.w13_scales, {experts, 2 * inner, hidden / kBlock}, TensorRole::kMxfp4Scales,
               hidden);
    add_expert(layout.w2, {experts, hidden, inner / kBlock, kBlock / 2}, TensorRole::kMxfp4Blocks,
               inner);
    add_expert(layout.w2_scales, {experts, hidden, inner / kBlock}, TensorRole::kMxfp4Scales,
               inner);
    add_expert(layout.w13_bias, {experts, 2 * inner}, TensorRole::kExpertBias, hidden);
    add_expert(layout.w2_bias, {experts, hidden}, TensorRole::kExpertBias, inner);
  }

  const ModelConfig& model_;
  const BlockLayout& layout_;
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

namespace {

/// The stack of a tensor's name.
LinearLayer stack_of(const ModelConfig& model, const BlockLayout& layout,
                     const std::string& pattern, LinearShape shape) {
  constexpr std::string_view kWeight = ".weight";
  LinearLayer stack{tensor_name(layout.block, pattern), shape};
  if (stack.name.ends_with(kWeight)) {
    stack.name.resize(stack.name.size() - kWeight.size());
  } else {
    stack.naming = layout.naming;
  }
  stack.experts = model.router.num_experts;
  stack.flat = layout.experts->storage == kRows;
  stack.transposed = layout.experts->storage == kStackedTransposed;
  return stack;
}

}  // namespace

std::vector<LinearLayer> expert_layers(const ModelConfig& model, const BlockLayout& layout,
                                       std::int64_t expert) {
  const std::int64_t hidden = model.experts_hidden(), inner = model.intermediate;
  const ExpertLayout& names = *layout.experts;
  const bool both = names.w3.empty() && family_row(model.family).gated;
  const auto layer_of = [&](const std::string& pattern, const std::string& bias,
                            LinearShape shape) {
    if (names.storage != kPerExpert) {
      LinearLayer stack = stack_of(model, layout, pattern, shape);
      if (!bias.empty()) stack.bias = tensor_name(layout.block, bias);
      return stack;
    }
    LinearLayer layer{tensor_name(layout.block, pattern, expert), shape};
    if (model.has_bias) layer.bias = layer.name + ".bias";
    return layer;
  };
  std::vector<LinearLayer> layers{
      layer_of(names.w1, names.w13_bias, {both ? 2 * inner : inner, hidden})};
  if (both) layers.back().gate_and_up = names.gate_up;
  if (!names.w3.empty()) layers.push_back(layer_of(names.w3, names.w3_bias, {inner, hidden}));
  layers.push_back(layer_of(names.w2, names.w2_bias, {hidden, inner}));
  if (names.storage == kRows) layers.back().transposed = true;
  return layers;
}

std::vector<LinearLayer> shared_layers(const ModelConfig& model, const BlockLayout& layout) {
  const std::int64_t hidden = model.hidden, inner = model.shared_intermediate;
  const bool both = layout.shared.up.empty() && family_row(model.family).gated;
  std::vector<LinearLayer> layers{{layout.shared.gate, {both ? 2 * inner : inner, hidden}}};
  if (both) layers.back().gate_and_up = GateUpLayout::kGateUp;
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

std::string part_name(const LinearLayer& layer, std::string_view suffix) {
  constexpr std::string_view kWeight = ".weight";
  if (layer.naming == Naming::kModule) return layer.name + std::string(suffix);
  if (suffix == kWeight) return layer.name;
  if (layer.naming == Naming::kShort && suffix.starts_with(kWeight)) {
    return layer.name + std::string(suffix.substr(kWeight.size()));
  }
  return layer.name + "_" + std::string(suffix.substr(1));
}

namespace {

/// Of the tensor that holds what each expert's layer has in this shape.
Shape stacked_shape(const LinearLayer& layer, Shape one) {
  if (layer.experts == 0) return one;
  if (one.rank() == 0) return {layer.experts};
  if (one.rank() == 1) return {layer.experts, one[0]};
  if (layer.transposed) one = {one[1], one[0]};
  return layer.flat ? Shape{layer.experts * one[0], one[1]} : Shape{layer.experts, one[0], one[1]};
}

}  // namespace

std::vector<TensorSpec> linear_tensors(const LinearLayer& layer, const LinearStorage& storage,
                                       TensorRole role) {
  const auto [out, in] = layer.shape;
  const auto spec_of = [&](std::string_view suffix, const Shape& one, TensorRole part_role) {
    TensorSpec spec{part_name(layer, suffix), stacked_shape(layer, one), part_role, layer.shape.in};
    spec.experts = layer.experts;
    spec.gate_and_up = layer.gate_and_up.has_value();
    return spec;
  };
  if (!storage) return {spec_of(".weight", {out, in}, role)};
  std::vector<TensorSpec> specs;
  for (const StoredTensor& part : storage.layout->tensors) {
    if (!is_allowed(part, storage.scheme)) continue;
    TensorSpec spec = spec_of(part.suffix, stored_shape(part, storage.scheme.weights, layer.shape),
                              TensorRole::kQuantized);
    spec.stored = &part;
    spec.required = is_required(part, storage.scheme);
    specs.push_back(std::move(spec));
  }
  return specs;
}

std::vector<TensorSpec> block_tensors(const ModelConfig& model, const BlockLayout& layout) {
  return TensorList(model, layout).list();
}

}  // namespace fusedmoe::checkpoint
