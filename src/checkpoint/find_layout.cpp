// Which of the layouts and names that a family knows a block's tensors have.
#include <algorithm>
#include <optional>
#include <string_view>

#include "checkpoint/layer_loader.h"
#include "checkpoint/stacked_experts.h"

namespace fusedmoe::checkpoint {
namespace {

// Whole-segment match of "experts.*.w1.weight", where * stands for a number.
bool matches(std::string_view name, std::string_view pattern) {
  const std::size_t star = pattern.find('*');
  if (star == std::string_view::npos) return name == pattern;
  if (!name.starts_with(pattern.substr(0, star))) return false;
  name.remove_prefix(star);
  const std::size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
  return digits > 0 && name.substr(digits) == pattern.substr(star + 1);
}

// A tensor of a linear layer, or a stacked one.
bool belongs(std::string_view name, std::string_view pattern, ExpertStorage storage) {
  if (pattern.empty()) return false;
  if (storage != ExpertStorage::kPerExpert) return matches(name, pattern);
  const std::size_t dot = name.rfind('.');
  return dot != std::string_view::npos && matches(name.substr(0, dot), pattern);
}

bool holds_experts(std::string_view name, const ExpertLayout& layout) {
  for (std::string_view pattern :
       {layout.w1, layout.w3, layout.w2, layout.w13_scales, layout.w2_scales}) {
    if (belongs(name, pattern, layout.storage)) return true;
  }
  return false;
}

// Of several ways to store such weights, the one whose tensors the first layer has.
std::optional<LinearStorage> find_storage(CheckpointLayout layout, const QuantScheme& scheme,
                                          const Block& block, const LinearLayer& first) {
  for (const LinearLayout* linear : linear_layouts(layout, scheme.weights)) {
    const bool there = std::all_of(linear->tensors.begin(), linear->tensors.end(),
                                   [&](const StoredTensor& stored) {
                                     return !is_required(stored, scheme) ||
                                            block.tensors.contains(part_name(first, stored.suffix));
                                   });
    if (there) return LinearStorage{linear, scheme};
  }
  return std::nullopt;
}

bool is_plain(const Block& block, const LinearLayer& layer) {
  const auto found = block.tensors.find(part_name(layer, ".weight"));
  return found != block.tensors.end() && is_float(found->second.tensor.dtype());
}

// In this scheme, or plain where the first layer is. Where its tensors are missing, as it is
// written.
LinearStorage storage_of(const std::vector<LinearLayer>& layers, const Block& block,
                         CheckpointLayout layout, const QuantScheme& scheme) {
  if (layers.empty() || is_plain(block, layers.front())) return {};
  if (const auto found = find_storage(layout, scheme, block, layers.front())) return *found;
  return {find_linear_layout(layout, scheme.weights), scheme};
}

bool is_packed(const QuantKey& key) {
  return key.value == DType::kE2M1 || key.value == DType::kI4 || key.value == DType::kU8;
}

// Of stacks, whose tensors have names of several kinds.
LinearStorage storage_of_stacks(const ModelConfig& model, const Block& block, BlockLayout& layout) {
  const bool transposed = layout.experts->storage == ExpertStorage::kStackedTransposed;
  if (layout.experts->storage == ExpertStorage::kRows ||
      (transposed && is_packed(model.scheme.weights))) {
    return {};
  }
  for (const Naming naming : {Naming::kShort, Naming::kJoined}) {
    layout.naming = naming;
    const LinearLayer first = expert_layers(model, layout, 0).front();
    if (is_plain(block, first)) return {};
    if (const auto found = find_storage(model.layout, model.scheme, block, first)) return *found;
  }
  return {find_linear_layout(model.layout, model.scheme.weights), model.scheme};
}

// Whether a tensor of that name, or a part of a linear layer of that name, is there.
bool has_tensor(const Block& block, const std::string& name) {
  const auto found = block.tensors.lower_bound(name);
  if (found == block.tensors.end() || !found->first.starts_with(name)) return false;
  return found->first.size() == name.size() || found->first[name.size()] == '.';
}

// The first of the names under which there is a tensor; without one it stays as published.
void choose_name(const Block& block, const std::string& segment,
                 const std::vector<std::string>& names, std::string& chosen) {
  if (chosen.empty()) return;
  for (const std::string& pattern : names) {
    const std::string name = tensor_name(segment, pattern);
    if (!has_tensor(block, name)) continue;
    chosen = name;
    return;
  }
  chosen = tensor_name(segment, names.front());
}

void choose_names(const ModelConfig& model, const Block& block, BlockLayout& layout) {
  const FamilyRow& row = family_row(model.family);
  choose_name(block, layout.block, row.router, layout.router);
  choose_name(block, layout.block, row.router_bias, layout.router_bias);
  choose_name(block, layout.block, row.correction_bias, layout.correction_bias);
  choose_name(block, layout.block, row.shared_gate, layout.shared_gate);
  choose_name(block, layout.block, row.latent_down, layout.latent_down);
  choose_name(block, layout.block, row.latent_up, layout.latent_up);
  if (model.shared_intermediate == 0) return;
  const auto full = [&](const std::string& pattern) {
    return pattern.empty() ? pattern : tensor_name(layout.block, pattern);
  };
  const auto present = [&](const SharedNames& names) {
    return has_tensor(block, full(names.gate));
  };
  auto names = std::find_if(row.shared.begin(), row.shared.end(), present);
  if (names == row.shared.end()) names = row.shared.begin();
  layout.shared = {full(names->gate), full(names->up), full(names->down)};
}

std::int64_t count_experts(const Block& block, const std::string& segment,
                           const ExpertLayout& layout) {
  std::int64_t count = 0;
  for (const auto& [name, entry] : block.tensors) {
    std::string_view inside = name;
    if (!segment.empty()) {
      if (!inside.starts_with(segment) || !inside.substr(segment.size()).starts_with('.')) continue;
      inside.remove_prefix(segment.size() + 1);
    }
    count += holds_experts(inside, layout);
  }
  return count;
}

// Of a stored matrix with `in` columns, as plain weights or in the scheme.
std::int64_t stored_columns(const ModelConfig& model, const BlockTensor& tensor, std::int64_t in) {
  const LinearLayout* linear = find_linear_layout(model.layout, model.scheme.weights);
  if (tensor.type || is_float(tensor.tensor.dtype()) || !linear) return in;
  return stored_shape(linear->tensors.front(), model.scheme.weights, {1, in})[1];
}

bool stacks_fit(const ModelConfig& model, const Block& block, const std::string& segment,
                const ExpertLayout& layout) {
  const bool transposed = layout.storage == ExpertStorage::kStackedTransposed;
  if (!transposed && layout.storage != ExpertStorage::kStacked) return false;
  const auto w1 = block.tensors.find(tensor_name(segment, layout.w1));
  const auto w2 = block.tensors.find(tensor_name(segment, layout.w2));
  if (w1 == block.tensors.end() || w2 == block.tensors.end()) return false;
  const auto fits = [&](const BlockTensor& tensor, std::int64_t in) {
    const Shape& shape = tensor.shape();
    const std::int64_t columns = stored_columns(model, tensor, in);
    if (transposed && columns != in) return false;
    return shape.rank() == 3 && shape[transposed ? 1 : 2] == columns;
  };
  return fits(w1->second, model.experts_hidden()) && fits(w2->second, model.intermediate);
}

}  // namespace

BlockLayout find_layout(const ModelConfig& model, const Block& block) {
  const FamilyRow& row = family_row(model.family);
  BlockLayout best = published_names(model, row.layouts.front());
  std::int64_t most = 0;
  for (const std::string& segment : row.blocks) {
    for (const ExpertLayout& layout : row.layouts) {
      // Two layouts of stacked tensors may differ in shapes alone.
      const std::int64_t count =
          2 * count_experts(block, segment, layout) + stacks_fit(model, block, segment, layout);
      if (count <= most) continue;
      most = count;
      best.block = segment;
      best.experts = &layout;
    }
  }
  choose_names(model, block, best);
  const auto beside = [&](const std::vector<LinearLayer>& layers, const QuantScheme& scheme) {
    return storage_of(layers, block, model.layout, scheme);
  };
  if (best.experts->storage == ExpertStorage::kPerExpert) {
    best.storage.experts = beside(expert_layers(model, best, 0), model.scheme);
  } else if (best.experts->storage != ExpertStorage::kMxfp4) {
    best.storage.experts = storage_of_stacks(model, block, best);
  }
  best.storage.down = best.storage.experts;
  if (model.shared_intermediate > 0) {
    best.storage.shared = best.storage.shared_down =
        beside(shared_layers(model, best), model.shared_scheme.value_or(model.scheme));
  }
  best.storage.shared_gate = beside(shared_gate_layer(model, best), model.scheme);
  best.storage.latent = beside(latent_layers(model, best), model.scheme);
  return best;
}

// Activations are a matter of the config, where it knows of MXFP4 at all.
QuantScheme mxfp4_scheme(const ModelConfig& model) {
  return model.scheme.weights == keys::mxfp4() ? model.scheme : schemes::mxfp4_w4a16();
}

QuantScheme stored_scheme(const ModelConfig& model, const Block& block) {
  const BlockLayout layout = find_layout(model, block);
  if (layout.experts->storage == ExpertStorage::kMxfp4) return mxfp4_scheme(model);
  if (layout.storage.experts) return model.scheme;
  if (layout.experts->storage == ExpertStorage::kStacked ||
      layout.experts->storage == ExpertStorage::kPerExpert) {
    const auto scheme = scheme_of_experts(layout, block);
    return scheme ? *scheme : model.scheme;
  }
  const auto first = block.tensors.find(tensor_name(layout.block, layout.experts->w1));
  return first != block.tensors.end() && is_float(first->second.tensor.dtype())
             ? schemes::unquantized(first->second.tensor.dtype())
             : model.scheme;
}

}  // namespace fusedmoe::checkpoint
