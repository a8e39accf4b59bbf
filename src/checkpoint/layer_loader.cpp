#include "checkpoint/layer_loader.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <set>
#include <span>
#include <tuple>

#include "checkpoint/block_schemes.h"
#include "checkpoint/causes.h"
#include "checkpoint/gate_up.h"
#include "checkpoint/matrix_reader.h"
#include "checkpoint/problems.h"
#include "checkpoint/stacked_experts.h"
#include "checkpoint/tensor_checks.h"
#include "checkpoint/uncalibrated.h"
#include "checkpoint/weight_faults.h"
#include "core/check.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::size_t kNothingFits = std::numeric_limits<std::size_t>::max();

/// The tensors that the checks of a loader would list; what they throw at once counts as more than
/// any number.
std::size_t misfits_of(const ModelConfig& model, const Block& block);

/// What says the scheme of matrices that are stored so; empty: their tensors.
std::string scheme_source(const std::string& label, const LinearStorage& first,
                          const LinearStorage& down) {
  const std::string& source = first.source.empty() ? down.source : first.source;
  return source.empty() ? source : core::format("{}: {}", label, source);
}

class Loader {
 public:
  Loader(const ModelConfig& model, const Block& block,
         const std::optional<std::vector<std::int32_t>>& experts = {})
      : model_(model),
        block_(block),
        layout_(find_layout(model, block)),
        in_gguf_(std::any_of(block.tensors.begin(), block.tensors.end(),
                             [](const auto& entry) { return entry.second.type != nullptr; })),
        reader_(block, problems_) {
    if (experts) {
      wanted_ = *experts;
    } else {
      wanted_.resize(static_cast<std::size_t>(model.router.num_experts));
      std::iota(wanted_.begin(), wanted_.end(), 0);
    }
  }

  /// Everything that names, shapes and dtypes tell.
  LayerSchemes check(const std::string& label) {
    check_served(model_, layout_, block_, label);
    if (const std::size_t misfits = count_misfits(); misfits > 0) {
      const std::string cause = cause_of_misfits(model_, block_, misfits, misfits_of);
      if (misfits == kNothingFits) throw Error::io(label, refusal(label, cause));
      report(label, cause);
    }
    return {experts_scheme(), scheme_of_shared_experts(model_, layout_, block_)};
  }

  /// Collects them.
  std::size_t count_misfits() {
    if (!is_read()) return kNothingFits;
    for (const TensorSpec& spec : block_tensors(model_, layout_)) {
      claim(spec);
    }
    ignore_zero_experts();
    for (const auto& [name, entry] : block_.tensors) {
      // Families write shared experts of width 0 and their gate, too.
      if (claimed_.contains(name) || entry.shape().numel() == 0 || gates_nothing(name)) continue;
      if (is_bias_beside_a_layer(name, entry)) continue;
      problems_.add(block_.prefix + name, "unexpected (" +
                                              (entry.type ? core::format("{} {}", entry.type->name,
                                                                         to_string(entry.shape()))
                                                          : core::describe(entry.tensor)) +
                                              ")");
    }
    return problems_.count();
  }

  LayerWeights load(const std::string& label) {
    check(label);
    LayerWeights layer;
    layer.router = model_.router;
    layer.router_weights = router_weights();
    const BlockStorage& storage = layout_.storage;
    layer.experts = experts();
    layer.experts.scheme_source = scheme_source(label, storage.experts, storage.down);
    if (model_.shared_intermediate > 0) {
      layer.shared_experts = shared_experts();
      layer.shared_experts->weights.scheme_source =
          scheme_source(label, storage.shared, storage.shared_down);
    }
    if (const auto layers = latent_layers(model_, layout_); !layers.empty()) {
      layer.latent = {reader_.plain_matrix(layers[0], layout_.storage.latent),
                      reader_.plain_matrix(layers[1], layout_.storage.latent)};
    }
    report(label, cause_of_missing_input_scales(model_, block_, layout_));
    validate(layer);
    return layer;
  }

  std::vector<UncalibratedScale> uncalibrated(const std::string& label) {
    check(label);
    ExpertWeights experts, shared;
    experts.experts.resize(wanted_.size());
    std::vector<UncalibratedScale> found = set_expert_scales(experts);
    if (model_.shared_intermediate > 0) {
      shared.experts.resize(1);
      set_shared_scales(shared);
    }
    report(label, cause_of_missing_input_scales(model_, block_, layout_));
    return found;
  }

 private:
  void validate(const LayerWeights& layer) const {
    const BlockStorage& storage = layout_.storage;
    const auto experts = [&](std::int64_t e) { return expert_layers(model_, layout_, e); };
    validate_stored(layer.experts, wanted_, {layout_, experts, storage.experts, storage.down},
                    block_.prefix);
    if (!layer.shared_experts) return;
    const auto shared = [&](std::int64_t) { return shared_layers(model_, layout_); };
    validate_stored(layer.shared_experts->weights, {0},
                    {layout_, shared, storage.shared, storage.shared_down}, block_.prefix);
  }

  bool gates_nothing(const std::string& name) const {
    const std::vector<std::string>& gates = family_row(model_.family).shared_gate;
    return model_.shared_intermediate == 0 &&
           std::any_of(gates.begin(), gates.end(), [&](const std::string& gate) {
             return name == tensor_name(layout_.block, gate);
           });
  }

  /// Exporters write zeros there; loading checks that they are.
  bool is_bias_beside_a_layer(const std::string& name, const BlockTensor& entry) const {
    return name.ends_with(".bias") && modules_.contains(module_of(name)) && !entry.type &&
           entry.tensor.rank() == 1 && is_float(entry.tensor.dtype());
  }

  /// Whether experts in this format are read from such tensors.
  bool is_read() const {
    const QuantScheme &scheme = layout_.storage.experts.scheme, &down = layout_.storage.down.scheme;
    if (!model_.quantization || in_gguf_) return true;
    if (layout_.experts->storage == ExpertStorage::kMxfp4) {
      return scheme.weights == keys::mxfp4() && down == scheme;
    }
    const auto is_stored = [](const LinearStorage& storage) {
      return storage || !storage.scheme.weights.quantized();
    };
    return is_stored(layout_.storage.experts) && is_stored(layout_.storage.down);
  }

  std::string refusal(const std::string& label, const std::string& cause) const {
    if (!cause.empty()) return core::format("{}: {}", label, cause);
    return core::format(
        "{}: config.quantization_config says that the experts are {} in the layout {}, but they "
        "are stored as {}, which nothing here reads in that format",
        label, configured_name(), name(model_.layout),
        tensor_name(layout_.block, layout_.experts->w1));
  }

  /// Of the scheme that the config says the experts have.
  std::string configured_name() const {
    return name(per_expert_scheme(layout_.storage, model_.scheme.weights.value));
  }

  /// Throws Error if there are problems; `cause`: what the config says wrongly, where that is
  /// known.
  void report(const std::string& label, const std::string& cause = {}) const {
    if (problems_.count() == 0) return;
    const bool quantized = is_quantized(layout_.storage);
    std::string list = problems_.list();
    if (problems_.count() == 1) list.replace(0, list.find_first_not_of("\n "), " ");
    throw Error::io(
        label,
        core::format("{}: {}{}{} not fit an MoE block of {}{}:{}", label, cause,
                     cause.empty() ? "" : ", so ",
                     problems_.count() == 1 ? std::string("1 tensor does")
                                            : core::format("{} tensors do", problems_.count()),
                     name(model_.family),
                     quantized
                         ? core::format(" in {}, layout {}", configured_name(), name(model_.layout))
                         : "",
                     list));
  }

  void claim(const TensorSpec& spec) {
    const std::string full_name = block_.prefix + spec.name;
    const auto found = block_.tensors.find(spec.name);
    const std::string_view suffix = spec.stored ? spec.stored->suffix : ".weight";
    if (spec.name.ends_with(suffix)) modules_.insert(module_of(spec.name));
    if (found == block_.tensors.end()) {
      if (spec.required) problems_.add(full_name, "missing, must be " + to_string(spec.shape));
      return;
    }
    claimed_.insert(found->first);
    const std::string problem = checks_.problem(spec, found->second);
    if (!problem.empty()) problems_.add(full_name, problem);
  }

  /// transformers writes first matrices of experts that have none.
  void ignore_zero_experts() {
    const RouterConfig& router = model_.router;
    if (layout_.experts->storage != ExpertStorage::kPerExpert) return;
    for (std::int64_t e = router.num_experts; e < router.num_choices(); ++e) {
      for (const LinearLayer& layer : expert_layers(model_, layout_, e)) {
        const auto found = block_.tensors.find(layer.name + ".weight");
        if (found != block_.tensors.end()) claimed_.insert(found->first);
      }
    }
  }

  QuantScheme experts_scheme() const {
    return scheme_of_experts(model_, layout_, block_, checks_.expert_dtype());
  }

  RouterWeights router_weights() {
    RouterWeights weights;
    weights.weight = reader_.tensor(layout_.router);
    weights.bias = reader_.tensor(layout_.router_bias);
    LinearLayer layer{module_of(layout_.router), {model_.router.num_choices(), model_.hidden}};
    layer.bias = layout_.router_bias;
    if (layer.name + ".bias" != layout_.correction_bias) reader_.check_no_bias(layer);
    if (const Tensor bias = reader_.tensor(layout_.correction_bias)) {
      weights.score_correction_bias = bias;
      if (bias.dtype() != DType::kF32 || bias.rank() != 1) {
        weights.score_correction_bias = Tensor::empty({model_.router.num_choices()}, DType::kF32);
        convert(bias.reshape({model_.router.num_choices()}), weights.score_correction_bias);
      }
    }
    return weights;
  }

  ExpertWeights experts() {
    ExpertWeights weights =
        empty_weights(model_.experts_hidden(), model_.intermediate, experts_scheme());
    const BlockStorage& storage = layout_.storage;
    for (const std::int32_t e : wanted_) {
      if (layout_.experts->storage == ExpertStorage::kMxfp4) {
        add_mxfp4_expert(weights, e);
      } else {
        add_expert(weights, expert_layers(model_, layout_, e), storage.experts, storage.down, e);
      }
    }
    set_expert_scales(weights);
    return weights;
  }

  SharedExperts shared_experts() {
    SharedExperts shared;
    shared.weights = empty_weights(model_.hidden, model_.shared_intermediate,
                                   *scheme_of_shared_experts(model_, layout_, block_));
    shared.weights.activation = model_.shared_activation;
    shared.weights.activation_params = model_.shared_activation_params;
    add_expert(shared.weights, shared_layers(model_, layout_), layout_.storage.shared,
               layout_.storage.shared_down, 0);
    set_shared_scales(shared.weights);
    for (const LinearLayer& layer : shared_gate_layer(model_, layout_)) {
      shared.gate = reader_.plain_matrix(layer, layout_.storage.shared_gate);
    }
    // Its sigmoid is one half for every token.
    if (model_.average_with_shared) shared.gate = Tensor::zeros({1, model_.hidden}, DType::kF32);
    return shared;
  }

  ExpertWeights empty_weights(std::int64_t hidden, std::int64_t intermediate,
                              const QuantScheme& scheme) const {
    ExpertWeights weights;
    weights.scheme = scheme;
    weights.hidden = hidden;
    weights.intermediate = intermediate;
    weights.activation = model_.activation;
    weights.activation_params = model_.activation_params;
    return weights;
  }

  // Gate, up and down; gate and up in one, and down; or the first and the last.
  void add_expert(ExpertWeights& weights, const std::vector<LinearLayer>& layers,
                  const LinearStorage& first, const LinearStorage& last, std::int64_t expert) {
    const auto read = [&](const LinearLayer& layer, const LinearStorage& storage) {
      return reader_.matrix(layer, storage, {expert, 0}, weights.owners);
    };
    ExpertMatrices matrices;
    matrices.gate = read(layers.front(), first);
    if (const auto both = layers.front().gate_and_up; both && problems_.count() == 0) {
      std::tie(matrices.gate, matrices.up) =
          split_gate_up(matrices.gate, weights.scheme.weights, *both);
      reader_.read_numbers(layers.front(), first, {expert, 1}, weights.owners, matrices.up);
    } else if (layers.size() == 3) {
      matrices.up = read(layers[1], first);
    }
    matrices.down = read(layers.back(), last);
    weights.experts.push_back(matrices);
  }

  void add_mxfp4_expert(ExpertWeights& weights, std::int64_t expert) {
    const auto part = [&](const std::string& pattern) {
      const std::string name = pattern.empty() ? pattern : tensor_name(layout_.block, pattern);
      return name.empty() ? TensorView() : reader_.stack(name, weights.owners).select(0, expert);
    };
    const auto read = [&](const std::string& blocks, const std::string& scales,
                          const std::string& bias) {
      WeightMatrix matrix;
      const TensorView values = part(blocks);
      matrix.values = values.reshape({values.size(0), values.size(1) * values.size(2)});
      matrix.scales = part(scales);
      matrix.bias = part(bias);
      return matrix;
    };
    const ExpertLayout& layout = *layout_.experts;
    ExpertMatrices matrices;
    std::tie(matrices.gate, matrices.up) =
        split_gate_up(read(layout.w1, layout.w13_scales, layout.w13_bias), weights.scheme.weights,
                      layout.gate_up);
    matrices.down = read(layout.w2, layout.w2_scales, layout.w2_bias);
    weights.experts.push_back(matrices);
  }

  std::vector<UncalibratedScale> set_expert_scales(ExpertWeights& weights) {
    const auto layers = [&](std::int64_t e) { return expert_layers(model_, layout_, e); };
    return set_scales(layers, layout_.storage.experts, layout_.storage.down, wanted_,
                      model_.router.num_experts, weights);
  }

  void set_shared_scales(ExpertWeights& weights) {
    constexpr std::int32_t kOnly = 0;
    const auto layers = [&](std::int64_t) { return shared_layers(model_, layout_); };
    set_scales(layers, layout_.storage.shared, layout_.storage.shared_down, {&kOnly, 1}, 1,
               weights);
  }

  template <typename LayersOf>
  std::vector<UncalibratedScale> set_scales(const LayersOf& layers_of, const LinearStorage& first,
                                            const LinearStorage& last,
                                            std::span<const std::int32_t> experts,
                                            std::int64_t num_experts, ExpertWeights& weights) {
    constexpr std::array<MatrixMember, 3> kMatrices{&ExpertMatrices::gate, &ExpertMatrices::up,
                                                    &ExpertMatrices::down};
    const auto read = [&](std::int64_t expert, MatrixMember matrix) {
      const std::vector<LinearLayer> layers = layers_of(expert);
      if (matrix == &ExpertMatrices::down)
        return reader_.input_scale(layers.back(), last, {expert});
      const bool up = matrix == &ExpertMatrices::up;
      return up && layers.size() == 3
                 ? reader_.input_scale(layers[1], first, {expert})
                 : reader_.input_scale(layers.front(), first, {expert, up ? 1 : 0});
    };
    std::vector<UncalibratedScale> result;
    const auto set = [&](const LinearStorage& storage, std::span<const MatrixMember> matrices) {
      if (!storage || !has_input_scale(storage.scheme)) return;
      for (UncalibratedScale& scale :
           set_input_scales({matrices, num_experts, read}, experts, weights, problems_)) {
        result.push_back(std::move(scale));
      }
    };
    const std::span<const MatrixMember> all(kMatrices);
    set(first, all.first(family_row(model_.family).gated ? 2 : 1));
    set(last, all.last(1));
    return result;
  }

  const ModelConfig& model_;
  const Block& block_;
  const BlockLayout layout_;
  const bool in_gguf_;  ///< with quantized blocks
  Problems problems_;
  MatrixReader reader_;
  std::set<std::string_view> claimed_;
  std::set<std::string> modules_;  ///< linear layers whose tensors are parts of a module
  TensorChecks checks_;
  std::vector<std::int32_t> wanted_;  ///< experts
};

template <typename Function>
auto within(const std::string& label, Function&& function) {
  try {
    return function();
  } catch (const Error& error) {
    if (error.argument() == label) throw;
    throw error.within(label);
  }
}

std::size_t misfits_of(const ModelConfig& model, const Block& block) {
  try {
    return Loader(model, block).count_misfits();
  } catch (const Error&) {
    return kNothingFits;
  }
}

}  // namespace

LayerWeights load_block(const ModelConfig& model, const Block& block, const std::string& label,
                        const std::optional<std::vector<std::int32_t>>& experts) {
  return within(label, [&] { return Loader(model, block, experts).load(label); });
}

LayerSchemes check_block(const ModelConfig& model, const Block& block, const std::string& label) {
  return within(label, [&] { return Loader(model, block).check(label); });
}

std::vector<UncalibratedScale> uncalibrated_scales(const ModelConfig& model, const Block& block,
                                                   const std::string& label) {
  return within(label, [&] { return Loader(model, block).uncalibrated(label); });
}

}  // namespace fusedmoe::checkpoint
