#include "checkpoint/find_layout.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "checkpoint/layer_formats.h"
#include "checkpoint/linear_codec.h"
#include "checkpoint/stacked_experts.h"
#include "core/check.h"

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

// Where its tensors are missing, as it is written.
LinearStorage storage_of(CheckpointLayout layout, const QuantScheme& scheme, const Block& block,
                         const LinearLayer& first) {
  if (const auto found = find_storage(layout, scheme, block, first)) return *found;
  return {find_linear_layout(layout, scheme.weights), scheme};
}

bool is_packed(const QuantKey& key) {
  return key.value == DType::kE2M1 || key.value == DType::kI4 || key.value == DType::kU8;
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

constexpr std::string_view kOneSharedFormat = "the shared experts must have one format";

/// The storage of modules, by the rules and the tensors that are there; and for stacks, of whose
/// tensors' names there are several kinds, which it is.
class StorageFinder {
 public:
  StorageFinder(const ModelConfig& model, const Block& block, BlockLayout& layout)
      : model_(model),
        rules_(*model.quantization),
        block_(block),
        layout_(layout),
        modules_(rules_, family_row(model.family), block.prefix, layout) {}

  BlockStorage find() {
    BlockStorage storage;
    choose_names_in_rules();
    const ExpertFormats formats = modules_.experts(model_.router.num_experts);
    modules_.check_transforms(block_.prefix + layer_of(layout_.router));
    if (layout_.experts->storage == ExpertStorage::kMxfp4) {
      const auto by_config = [](const ModuleFormat& format) {
        if (!format.scheme) return LinearStorage{};
        return LinearStorage{nullptr, *format.scheme, source_of(format)};
      };
      storage.experts = by_config(formats.first);
      storage.down = by_config(formats.down);
    } else if (!was_mxfp4()) {
      if (layout_.experts->storage != ExpertStorage::kPerExpert) choose_naming(formats.first);
      const std::vector<LinearLayer> experts = expert_layers(model_, layout_, 0);
      const LinearStorage first = by_format(experts.front(), formats.first),
                          down = by_format(experts.back(), formats.down);
      if (formats.mixture && !all_fit(first, down)) throw Error(*formats.mixture);
      const auto checked = [&](const LinearLayer& layer, const ModuleFormat& format,
                               const LinearStorage& stored) {
        if (formats.linear && layer.experts > 0 && is_plain(block_, layer)) return LinearStorage{};
        check_agreement(layer, format);
        return is_read(format) ? stored : LinearStorage{nullptr, *format.scheme, source_of(format)};
      };
      storage.experts = checked(experts.front(), formats.first, first);
      storage.down = checked(experts.back(), formats.down, down);
    }
    if (model_.shared_intermediate > 0) {
      const std::vector<LinearLayer> shared = shared_layers(model_, layout_);
      storage.shared = storage_beside(shared);
      storage.shared_down = storage_beside({shared.back()});
      check_shared(shared, storage);
    }
    storage.shared_gate = storage_beside(shared_gate_layer(model_, layout_));
    storage.latent = storage_beside(latent_layers(model_, layout_));
    return storage;
  }

 private:
  /// Without ".weight".
  static std::string layer_of(const std::string& tensor) {
    return tensor.substr(0, tensor.rfind(".weight"));
  }

  /// Other names than those of the file count only if the tensors do not contradict them.
  void choose_names_in_rules() {
    if (!modules_.renamed() || agree(modules_)) return;
    LayerModules own = modules_;
    own.use_names_of_file();
    if (agree(own)) modules_ = std::move(own);
  }

  /// As the rules say that it is stored.
  LinearStorage by_format(const LinearLayer& layer, const ModuleFormat& format) const {
    if (!format.scheme) return {};
    LinearStorage storage = storage_of(rules_.layout, *format.scheme, block_, layer);
    storage.source = source_of(format);
    return storage;
  }

  /// Whether the experts' tensors are what the rules say; of stacks, whether both are quantized.
  bool agree(LayerModules& modules) const {
    try {
      const ExpertFormats formats = modules.experts(model_.router.num_experts);
      const std::vector<LinearLayer> layers = expert_layers(model_, layout_, 0);
      if (layout_.experts->storage == ExpertStorage::kPerExpert) {
        return all_fit(by_format(layers.front(), formats.first),
                       by_format(layers.back(), formats.down));
      }
      return is_plain(block_, layers.front()) == !formats.first.scheme &&
             is_plain(block_, layers.back()) == !formats.down.scheme;
    } catch (const Error&) {
      return false;
    }
  }

  /// Models in bf16 that were made from one in MXFP4 keep its config.
  bool was_mxfp4() const {
    return rules_.layout == CheckpointLayout::kGptOss &&
           is_plain(block_, expert_layers(model_, layout_, 0).front());
  }

  void choose_naming(const ModuleFormat& format) {
    for (const Naming naming : {Naming::kShort, Naming::kJoined}) {
      layout_.naming = naming;
      const LinearLayer first = expert_layers(model_, layout_, 0).front();
      if (is_plain(block_, first)) return;
      if (format.scheme && find_storage(rules_.layout, *format.scheme, block_, first)) return;
    }
  }

  /// Packed values are not read from matrices that lie across, nor others from rows of all experts.
  bool is_read(const ModuleFormat& format) const {
    if (!format.scheme || layout_.experts->storage == ExpertStorage::kPerExpert) return true;
    const bool transposed = layout_.experts->storage == ExpertStorage::kStackedTransposed;
    return layout_.experts->storage != ExpertStorage::kRows &&
           !(transposed && is_packed(format.scheme->weights));
  }

  /// The config and the tensors must agree about what is quantized.
  void check_agreement(const LinearLayer& layer, const ModuleFormat& format) const {
    const std::string weight = part_name(layer, ".weight");
    const std::string source = source_of(format);
    if (is_plain(block_, layer)) {
      if (!format.scheme) return;
      const DType dtype = block_.tensors.find(weight)->second.tensor.dtype();
      throw Error::io(source,
                      core::format("{} says that {}{} is {}, but its weight is plain {}", source,
                                   block_.prefix, layer.name, name(*format.scheme), name(dtype)));
    }
    const std::string begin = layer.naming == Naming::kModule ? layer.name + "." : weight;
    const auto is_own = [&](const auto& at) {
      return at != block_.tensors.end() && at->first.starts_with(begin);
    };
    auto part = block_.tensors.lower_bound(begin);
    while (is_own(part) && !part->second.type && is_float(part->second.tensor.dtype())) ++part;
    if (format.scheme || !is_own(part)) return;
    throw Error::io(
        source,
        core::format(
            "{} {}{}{}, but the file holds {}{} in {}",
            format.source.empty() ? "no entry of " + source + " quantizes" : source + " says that",
            block_.prefix, layer.name, format.source.empty() ? "" : " is not quantized",
            block_.prefix, part->first,
            part->second.type ? part->second.type->name : name(part->second.tensor.dtype())));
  }

  /// Whether every expert has the tensors of these formats.
  bool all_fit(const LinearStorage& first, const LinearStorage& down) const {
    const auto fits = [&](const TensorSpec& spec) {
      const auto found = block_.tensors.find(spec.name);
      if (found == block_.tensors.end()) return !spec.required;
      const BlockTensor& tensor = found->second;
      return spec.stored ? accepts_shape(*spec.stored, spec.shape, tensor.shape())
                         : is_float(tensor.tensor.dtype());
    };
    for (std::int64_t e = 0; e < model_.router.num_experts; ++e) {
      const std::vector<LinearLayer> layers = expert_layers(model_, layout_, e);
      for (const LinearLayer& layer : layers) {
        const LinearStorage& own = &layer == &layers.back() ? down : first;
        const auto specs = linear_tensors(layer, own, TensorRole::kExpertWeight);
        if (layer.experts > 0 || !std::all_of(specs.begin(), specs.end(), fits)) return false;
      }
    }
    return true;
  }

  /// Of the first of these layers; null where the file holds it as it was.
  LinearStorage storage_beside(const std::vector<LinearLayer>& layers) {
    if (layers.empty() || is_plain(block_, layers.front())) return {};
    const ModuleFormat& format = modules_.beside(layers.front().name);
    check_agreement(layers.front(), format);
    if (!format.scheme) return {};
    return by_format(layers.front(), format);
  }

  /// Gate and up of the shared experts are both quantized, or neither.
  void check_shared_pair(const LinearLayer& gate, const LinearLayer& up) {
    if (is_plain(block_, gate) == is_plain(block_, up)) return;
    const LinearLayer &plain = is_plain(block_, gate) ? gate : up,
                      &other = is_plain(block_, gate) ? up : gate;
    if (!has_tensor(block_, other.name)) return;
    const ModuleFormat plain_format = modules_.beside(plain.name),
                       other_format = modules_.beside(other.name);
    check_agreement(plain, plain_format);
    check_agreement(other, other_format);
    const std::string source =
        plain_format.source.empty() ? other_format.source : plain_format.source;
    throw Error::unsupported(Reason::kQuantScheme, source,
                             core::format("{} says that {}{} is not quantized and {}{} is {}: {}",
                                          source, block_.prefix, plain.name, block_.prefix,
                                          other.name, text_of(other_format), kOneSharedFormat));
  }

  /// Gate and up must have one format, and the inputs of all.
  void check_shared(const std::vector<LinearLayer>& layers, const BlockStorage& storage) {
    if (layers.size() == 3) check_shared_pair(layers[0], layers[1]);
    for (const LinearLayer& layer : layers) {
      const ModuleFormat& format = modules_.beside(layer.name);
      const bool down = &layer == &layers.back();
      const LinearStorage& wanted = down ? storage.shared_down : storage.shared;
      if (!format.scheme || !wanted || is_plain(block_, layer)) continue;
      const bool same_inputs =
          !storage.shared || format.scheme->activations == storage.shared.scheme.activations;
      if (*format.scheme == wanted.scheme && same_inputs) continue;
      throw Error::unsupported(
          Reason::kQuantScheme, format.source,
          core::format("{} says that {}{} is {}, but {}{} is {}: {}", format.source, block_.prefix,
                       layer.name, name(*format.scheme), block_.prefix, layers.front().name,
                       name(wanted.scheme), kOneSharedFormat));
    }
  }

  const ModelConfig& model_;
  const QuantRules& rules_;
  const Block& block_;
  BlockLayout& layout_;
  LayerModules modules_;
};

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
  if (model.quantization) best.storage = StorageFinder(model, block, best).find();
  return best;
}

QuantScheme mxfp4_scheme(const BlockLayout& layout) {
  // Activations are a matter of the config, where it knows of MXFP4 at all.
  const QuantScheme& scheme = layout.storage.experts.scheme;
  return scheme.weights == keys::mxfp4() ? scheme : schemes::mxfp4_w4a16();
}

QuantScheme per_expert_scheme(const BlockStorage& storage, DType plain) {
  const auto scheme_of = [&](const LinearStorage& part) {
    return part.scheme.weights.quantized() ? part.scheme : schemes::unquantized(plain);
  };
  QuantScheme scheme = scheme_of(storage.experts);
  const QuantScheme down = scheme_of(storage.down);
  if (down.weights != scheme.weights) scheme.down = down.weights;
  return scheme;
}

QuantScheme stored_scheme(const ModelConfig& model, const Block& block) {
  const BlockLayout layout = find_layout(model, block);
  const ExpertLayout& experts = *layout.experts;
  if (experts.storage == ExpertStorage::kMxfp4) return mxfp4_scheme(layout);
  const bool in_layers = experts.storage == ExpertStorage::kPerExpert;
  if (!is_quantized(layout.storage) && (in_layers || experts.storage == ExpertStorage::kStacked)) {
    return scheme_of_experts(layout, block).value_or(model.scheme);
  }
  DType plain = model.scheme.weights.value;
  for (const std::string& pattern : {experts.w2, experts.w1}) {
    const auto found =
        block.tensors.find(tensor_name(layout.block, pattern) + (in_layers ? ".weight" : ""));
    if (found == block.tensors.end() || !is_float(found->second.tensor.dtype())) continue;
    plain = found->second.tensor.dtype();
  }
  return per_expert_scheme(layout.storage, plain);
}

}  // namespace fusedmoe::checkpoint
