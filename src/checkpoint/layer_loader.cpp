#include "checkpoint/layer_loader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <set>

#include "checkpoint/problems.h"
#include "core/check.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {
namespace {

bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

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

std::string names(std::span<const DType> dtypes) {
  std::string result;
  for (const DType dtype : dtypes) {
    if (!result.empty()) result += dtype == dtypes.back() ? " or " : ", ";
    result += name(dtype);
  }
  return result;
}

// Activations are a matter of the config, where it knows of MXFP4 at all.
QuantScheme mxfp4_scheme(const ModelConfig& model) {
  return model.scheme.weights == keys::mxfp4() ? model.scheme : schemes::mxfp4_w4a16();
}

// compressed-tensors stores 0 for the input scale of an expert that saw no token of the calibration
// data, which decodes to infinity: it gets the largest one of the other experts.
void replace_uncalibrated(ExpertWeights& weights,
                          std::initializer_list<WeightMatrix ExpertMatrices::*> matrices) {
  float largest = 0;
  const auto for_each_scale = [&](const auto& function) {
    for (ExpertMatrices& expert : weights.experts) {
      for (const auto member : matrices) {
        TensorView& scale = (expert.*member).input_scale;
        if (scale.defined() && scale.dtype() == DType::kF32) function(scale);
      }
    }
  };
  for_each_scale([&](const TensorView& scale) {
    const float value = *scale.as<const float>();
    if (std::isfinite(value)) largest = std::max(largest, value);
  });
  if (largest == 0) return;
  for_each_scale([&](TensorView& scale) {
    if (!std::isinf(*scale.as<const float>())) return;
    const Tensor replacement = Tensor::empty({1}, DType::kF32);
    *replacement.as<float>() = largest;
    scale = replacement;
    weights.owners.push_back(replacement.owner());
  });
}

void replace_uncalibrated(ExpertWeights& weights) {
  replace_uncalibrated(weights, {&ExpertMatrices::gate, &ExpertMatrices::up});
  replace_uncalibrated(weights, {&ExpertMatrices::down});
}

class Loader {
 public:
  Loader(const ModelConfig& model, const Block& block)
      : model_(model), block_(block), layout_(find_layout(model, block)) {}

  LayerWeights load(const std::string& label) {
    check_layout();
    for (const TensorSpec& spec :
         block_tensors(model_, layout_.block, *layout_.experts, layout_.storage)) {
      claim(spec);
    }
    for (const auto& [name, entry] : block_.tensors) {
      if (claimed_.contains(name)) continue;
      problems_.add(block_.prefix + name,
                    "not claimed by any rule (" + core::describe(entry.tensor) + ")");
    }
    report(label);
    LayerWeights layer;
    layer.router = model_.router;
    layer.router_weights = router_weights();
    layer.experts = experts();
    if (model_.shared_intermediate > 0) layer.shared_experts = shared_experts();
    report(label);
    layer.experts.validate();
    if (layer.shared_experts) layer.shared_experts->weights.validate();
    return layer;
  }

 private:
  void check_layout() const {
    if (!model_.scheme.weights.quantized()) return;
    const ExpertStorage storage = layout_.experts->storage;
    const bool stored =
        storage == ExpertStorage::kPerExpert
            ? layout_.storage.experts != nullptr
            : storage == ExpertStorage::kMxfp4 && model_.scheme.weights == keys::mxfp4();
    FUSEDMOE_CHECK_FILE(
        stored, "config.quantization_config",
        core::format("{} in the layout {}, but experts are stored as {}", name(model_.scheme),
                     name(model_.layout), tensor_name(layout_.block, layout_.experts->w1)),
        "in agreement with the tensors");
  }

  void report(const std::string& label) const {
    if (problems_.count() == 0) return;
    throw Error::malformed(
        label, core::format("{} tensors that do not fit:{}", problems_.count(), problems_.list()),
        core::format(
            "exactly the tensors of an MoE block of {}{}", name(model_.family),
            model_.scheme.weights.quantized()
                ? core::format(" in {}, layout {}", name(model_.scheme), name(model_.layout))
                : ""));
  }

  void claim(const TensorSpec& spec) {
    const std::string full_name = block_.prefix + spec.name;
    const auto found = block_.tensors.find(spec.name);
    if (found == block_.tensors.end()) {
      if (spec.required) problems_.add(full_name, "missing, must be " + to_string(spec.shape));
      return;
    }
    claimed_.insert(found->first);
    const Tensor& tensor = found->second.tensor;
    if (!(spec.stored ? accepts_shape(*spec.stored, spec.shape, tensor.shape())
                      : tensor.shape() == spec.shape)) {
      problems_.add(full_name,
                    "shape " + to_string(tensor.shape()) + ", must be " + to_string(spec.shape));
    }
    check_dtype(full_name, tensor.dtype(), spec);
  }

  void check_dtype(const std::string& full_name, DType dtype, const TensorSpec& spec) {
    const auto complain = [&](const std::string& wanted) {
      problems_.add(full_name, core::format("dtype {}, must be {}", name(dtype), wanted));
    };
    switch (spec.role) {
      case TensorRole::kMxfp4Blocks:
        if (dtype != DType::kU8) complain("u8");
        return;
      case TensorRole::kMxfp4Scales:
        if (dtype != DType::kU8 && dtype != DType::kE8M0) complain("u8 or e8m0");
        return;
      case TensorRole::kQuantized: {
        const std::span<const DType> accepted = spec.stored->dtypes;
        if (std::find(accepted.begin(), accepted.end(), dtype) == accepted.end()) {
          complain(names(accepted));
        }
        return;
      }
      default:
        break;
    }
    if (!is_float(dtype)) return complain("f32, bf16 or f16");
    // One dtype for all expert weights, one for the shared ones.
    if (spec.role != TensorRole::kExpertWeight && spec.role != TensorRole::kSharedWeight) return;
    std::optional<DType>& common =
        spec.role == TensorRole::kExpertWeight ? expert_dtype_ : shared_dtype_;
    if (!common) common = dtype;
    if (dtype != *common) complain(std::string(name(*common)) + " like the others of its kind");
  }

  Tensor tensor(std::string_view pattern) const {
    return block_.tensors.find(tensor_name(layout_.block, pattern))->second.tensor;
  }
  Tensor optional_tensor(std::string_view pattern, bool present) const {
    return present && !pattern.empty() ? tensor(pattern) : Tensor();
  }

  RouterWeights router_weights() const {
    const FamilyRow& row = family_row(model_.family);
    RouterWeights weights;
    weights.weight = tensor(row.router);
    weights.bias = optional_tensor(row.router_bias, model_.has_bias);
    if (const Tensor bias = optional_tensor(row.correction_bias, model_.has_correction_bias)) {
      weights.score_correction_bias = bias;
      if (bias.dtype() != DType::kF32) {
        weights.score_correction_bias = Tensor::empty(bias.shape(), DType::kF32);
        convert(bias, weights.score_correction_bias);
      }
    }
    return weights;
  }

  ExpertWeights experts() {
    const ExpertLayout& layout = *layout_.experts;
    if (layout.storage == ExpertStorage::kPerExpert) {
      ExpertWeights weights =
          empty_weights(model_.intermediate, layout_.storage.experts, expert_dtype_);
      for (std::int64_t e = 0; e < model_.router.num_experts; ++e) {
        add_expert(weights, expert_layers(model_, layout_.block, layout, e),
                   layout_.storage.experts, model_.has_bias);
      }
      replace_uncalibrated(weights);
      return weights;
    }
    const bool mxfp4 = layout.storage == ExpertStorage::kMxfp4;
    ExpertWeights::Stacked stacked;
    stacked.w13 = tensor(layout.w1);
    stacked.w2 = tensor(layout.w2);
    stacked.w13_scales = optional_tensor(layout.w13_scales, mxfp4);
    stacked.w2_scales = optional_tensor(layout.w2_scales, mxfp4);
    stacked.w13_bias = optional_tensor(layout.w13_bias, model_.has_bias);
    stacked.w2_bias = optional_tensor(layout.w2_bias, model_.has_bias);
    stacked.gate_up_layout = layout.gate_up;
    stacked.transposed = layout.storage == ExpertStorage::kStackedTransposed;
    return ExpertWeights::from_stacked(
        stacked, mxfp4 ? mxfp4_scheme(model_) : schemes::unquantized(*expert_dtype_),
        model_.activation, model_.activation_params);
  }

  SharedExperts shared_experts() {
    SharedExperts shared;
    shared.weights =
        empty_weights(model_.shared_intermediate, layout_.storage.shared, shared_dtype_);
    add_expert(shared.weights, shared_layers(model_, layout_.block), layout_.storage.shared, false);
    replace_uncalibrated(shared.weights);
    shared.gate = optional_tensor(family_row(model_.family).shared_gate, model_.shared_expert_gate);
    return shared;
  }

  ExpertWeights empty_weights(std::int64_t intermediate, const LinearLayout* linear,
                              std::optional<DType> dtype) const {
    ExpertWeights weights;
    weights.scheme = linear ? model_.scheme : schemes::unquantized(*dtype);
    weights.hidden = model_.hidden;
    weights.intermediate = intermediate;
    weights.activation = model_.activation;
    weights.activation_params = model_.activation_params;
    return weights;
  }

  // Gate, up, down.
  void add_expert(ExpertWeights& weights, const std::array<LinearLayer, 3>& layers,
                  const LinearLayout* linear, bool has_bias) {
    const auto load = [&](const LinearLayer& layer) {
      WeightMatrix result = matrix(layer, linear, weights.owners);
      if (has_bias) result.bias = view(layer.name + ".bias", weights.owners);
      return result;
    };
    weights.experts.push_back({load(layers[0]), load(layers[1]), load(layers[2])});
  }

  WeightMatrix matrix(const LinearLayer& layer, const LinearLayout* linear,
                      std::vector<std::shared_ptr<const void>>& owners) {
    WeightMatrix result;
    if (!linear) {
      result.values = view(layer.name + ".weight", owners);
      return result;
    }
    for (const StoredTensor& stored : linear->tensors) {
      const std::string name = layer.name + std::string(stored.suffix);
      if (!is_allowed(stored, model_.scheme) || !block_.tensors.contains(name)) continue;
      collect(name, [&] {
        decode(stored, view(name, owners), model_.scheme, layer.shape, result, owners);
      });
    }
    collect(layer.name, [&] { split_group_scales(model_.scheme.weights, result, owners); });
    return result;
  }

  // Contents that do not fit are problems like missing tensors.
  template <typename Function>
  void collect(const std::string& name, Function&& function) {
    try {
      function();
    } catch (const Error& error) {
      problems_.add(block_.prefix + name, error.was().empty()
                                              ? std::string(error.what())
                                              : core::format("{} {}, must be {}", error.argument(),
                                                             error.was(), error.must_be()));
    }
  }

  // Consecutive tensors mostly share a file: its mapping is kept once.
  TensorView view(const std::string& name, std::vector<std::shared_ptr<const void>>& owners) const {
    const Tensor& tensor = block_.tensors.find(name)->second.tensor;
    if (owners.empty() || owners.back() != tensor.owner()) owners.push_back(tensor.owner());
    return tensor;
  }

  const ModelConfig& model_;
  const Block& block_;
  const BlockLayout layout_;
  Problems problems_;
  std::set<std::string_view> claimed_;
  std::optional<DType> expert_dtype_, shared_dtype_;
};

// The linear layers of a quantized model; null for unquantized ones.
const LinearLayout* shared_storage(const ModelConfig& model, const Block& block,
                                   std::string_view segment, const LinearLayout* linear) {
  if (!linear || model.shared_intermediate == 0) return nullptr;
  const auto found = block.tensors.find(shared_layers(model, segment)[0].name + ".weight");
  const bool plain = found != block.tensors.end() && is_float(found->second.tensor.dtype());
  return plain ? nullptr : linear;
}

}  // namespace

BlockLayout find_layout(const ModelConfig& model, const Block& block) {
  const FamilyRow& row = family_row(model.family);
  BlockLayout best{row.blocks.front(), &row.layouts.front(), {}};
  std::int64_t most = 0;
  for (std::string_view segment : row.blocks) {
    for (const ExpertLayout& layout : row.layouts) {
      std::int64_t count = 0;
      for (const auto& [name, entry] : block.tensors) {
        const std::string_view view = name;
        count += view.starts_with(segment) && view.substr(segment.size()).starts_with('.') &&
                 holds_experts(view.substr(segment.size() + 1), layout);
      }
      if (count > most) {
        most = count;
        best = {segment, &layout, {}};
      }
    }
  }
  if (best.experts->storage == ExpertStorage::kPerExpert) {
    best.storage.experts = find_linear_layout(model.layout, model.scheme.weights);
    best.storage.shared = shared_storage(model, block, best.block, best.storage.experts);
  }
  return best;
}

QuantScheme stored_scheme(const ModelConfig& model, const Block& block) {
  const BlockLayout layout = find_layout(model, block);
  if (layout.experts->storage == ExpertStorage::kMxfp4) return mxfp4_scheme(model);
  if (layout.storage.experts) return model.scheme;
  const std::string suffix = layout.experts->storage == ExpertStorage::kPerExpert ? ".weight" : "";
  const auto first = block.tensors.find(tensor_name(layout.block, layout.experts->w1) + suffix);
  return first != block.tensors.end() && is_float(first->second.tensor.dtype())
             ? schemes::unquantized(first->second.tensor.dtype())
             : model.scheme;
}

LayerWeights load_block(const ModelConfig& model, const Block& block, const std::string& label) {
  LayerWeights layer;
  try {
    layer = Loader(model, block).load(label);
  } catch (const Error& error) {
    if (error.argument() == label) throw;
    throw error.within(label);
  }
  return layer;
}

}  // namespace fusedmoe::checkpoint
