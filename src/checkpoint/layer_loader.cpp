#include "checkpoint/layer_loader.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "checkpoint/gguf_blocks.h"
#include "checkpoint/problems.h"
#include "checkpoint/stacked_experts.h"
#include "checkpoint/tensor_checks.h"
#include "checkpoint/uncalibrated.h"
#include "core/check.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {
namespace {

class Loader {
 public:
  Loader(const ModelConfig& model, const Block& block,
         const std::optional<std::vector<std::int32_t>>& experts = {})
      : model_(model),
        block_(block),
        layout_(find_layout(model, block)),
        in_gguf_(std::any_of(block.tensors.begin(), block.tensors.end(),
                             [](const auto& entry) { return entry.second.type != nullptr; })),
        all_(!experts) {
    if (experts) {
      wanted_ = *experts;
    } else {
      wanted_.resize(static_cast<std::size_t>(model.router.num_experts));
      std::iota(wanted_.begin(), wanted_.end(), 0);
    }
  }

  /// Everything that names, shapes and dtypes tell.
  LayerSchemes check(const std::string& label) {
    check_refused(label);
    check_layout();
    for (const TensorSpec& spec : block_tensors(model_, layout_)) {
      claim(spec);
    }
    ignore_zero_experts();
    for (const auto& [name, entry] : block_.tensors) {
      // Families write shared experts of width 0 and their gate, too.
      if (claimed_.contains(name) || entry.shape().numel() == 0 || gates_nothing(name)) continue;
      problems_.add(block_.prefix + name, "unexpected (" +
                                              (entry.type ? core::format("{} {}", entry.type->name,
                                                                         to_string(entry.shape()))
                                                          : core::describe(entry.tensor)) +
                                              ")");
    }
    report(label);
    return {experts_scheme(), shared_scheme()};
  }

  LayerWeights load(const std::string& label) {
    check(label);
    LayerWeights layer;
    layer.router = model_.router;
    layer.router_weights = router_weights();
    layer.experts = experts();
    if (model_.shared_intermediate > 0) layer.shared_experts = shared_experts();
    if (const auto layers = latent_layers(model_, layout_); !layers.empty()) {
      layer.latent = {plain_matrix(layers[0], layout_.storage.latent),
                      plain_matrix(layers[1], layout_.storage.latent)};
    }
    report(label);
    layer.experts.validate();
    if (layer.shared_experts) layer.shared_experts->weights.validate();
    return layer;
  }

 private:
  void check_refused(const std::string& label) const {
    for (const auto& [name, reason] : family_row(model_.family).refused_tensors) {
      if (!block_.tensors.contains(tensor_name(layout_.block, name))) continue;
      throw Error::unsupported(Reason::kModel, label, core::format("{}: {}", label, reason));
    }
    const std::pair<const LinearStorage&, const std::string&> others[] = {
        {layout_.storage.shared_gate, layout_.shared_gate},
        {layout_.storage.latent, layout_.latent_down}};
    for (const auto& [stored, layer] : others) {
      if (!stored || !stored.scheme.activations) continue;
      throw Error::unsupported(
          Reason::kModel, label,
          core::format("{}: {} is quantized together with its input, which is computed for experts "
                       "only: leave it out when quantizing",
                       label, layer));
    }
    if (!layout_.storage.shared || model_.shared_intermediate == 0 || !shared_in_one()) return;
    throw Error::unsupported(
        Reason::kModel, label,
        core::format("{}: {} holds gate and up of the shared experts in one quantized tensor: only "
                     "f32, bf16 and f16 ones are split",
                     label, layout_.shared.gate));
  }

  bool gates_nothing(const std::string& name) const {
    const std::vector<std::string>& gates = family_row(model_.family).shared_gate;
    return model_.shared_intermediate == 0 &&
           std::any_of(gates.begin(), gates.end(), [&](const std::string& gate) {
             return name == tensor_name(layout_.block, gate);
           });
  }

  void check_layout() const {
    if (!model_.scheme.weights.quantized() || in_gguf_) return;
    const ExpertStorage storage = layout_.experts->storage;
    const bool stored =
        storage == ExpertStorage::kPerExpert
            ? layout_.storage.experts.layout != nullptr
            : storage == ExpertStorage::kMxfp4 && model_.scheme.weights == keys::mxfp4();
    FUSEDMOE_CHECK_FILE(
        stored, "config.quantization_config",
        core::format("{} in the layout {}, but experts are stored as {}", name(model_.scheme),
                     name(model_.layout), tensor_name(layout_.block, layout_.experts->w1)),
        "in agreement with the tensors");
  }

  void report(const std::string& label) const {
    if (problems_.count() == 0) return;
    throw Error::io(
        label, core::format(
                   "{}: {} not fit an MoE block of {}{}:{}", label,
                   problems_.count() == 1 ? std::string("1 tensor does")
                                          : core::format("{} tensors do", problems_.count()),
                   name(model_.family),
                   model_.scheme.weights.quantized() && !in_gguf_
                       ? core::format(" in {}, layout {}", name(model_.scheme), name(model_.layout))
                       : "",
                   problems_.list()));
  }

  void claim(const TensorSpec& spec) {
    const std::string full_name = block_.prefix + spec.name;
    const auto found = block_.tensors.find(spec.name);
    if (found == block_.tensors.end()) {
      if (spec.required) problems_.add(full_name, "missing, must be " + to_string(spec.shape));
      return;
    }
    claimed_.insert(found->first);
    for (const std::string& text : checks_.problems(spec, found->second)) {
      problems_.add(full_name, text);
    }
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

  const BlockTensor& entry(const std::string& name) const {
    return block_.tensors.find(name)->second;
  }
  QuantKey format_of(const std::string& name) const { return *key_of(entry(name)); }

  QuantScheme experts_scheme() const {
    const ExpertLayout& layout = *layout_.experts;
    if (layout.storage == ExpertStorage::kMxfp4) return mxfp4_scheme(model_);
    if (layout_.storage.experts) return layout_.storage.experts.scheme;
    if (layout.storage == ExpertStorage::kPerExpert) return scheme_of_all_experts();
    if (layout.storage != ExpertStorage::kStacked)
      return schemes::unquantized(*checks_.expert_dtype());
    if (!layout.w3.empty()) {
      check_same_format(entry(tensor_name(layout_.block, layout.w1)),
                        entry(tensor_name(layout_.block, layout.w3)), layout.w3);
    }
    return *scheme_of_experts(layout_, block_);
  }

  /// By the formats of gate, up and down, or of the first and the last.
  QuantScheme scheme_of_layers(const std::vector<LinearLayer>& layers) const {
    const std::string first = layers.front().name + ".weight";
    if (layers.size() == 3) {
      check_same_format(entry(first), entry(layers[1].name + ".weight"), layers[1].name);
    }
    return *scheme_of_tensors(block_, first, layers.back().name + ".weight");
  }

  QuantScheme scheme_of_all_experts() const {
    const QuantScheme scheme = scheme_of_layers(expert_layers(model_, layout_, 0));
    for (std::int64_t e = 1; e < model_.router.num_experts; ++e) {
      const std::vector<LinearLayer> layers = expert_layers(model_, layout_, e);
      const QuantScheme own = scheme_of_layers(layers);
      FUSEDMOE_CHECK_SUPPORTED(
          own == scheme, kQuantScheme, layers.front().name,
          core::format("in {}, while expert 0 is in {}", name(own), name(scheme)),
          "in the format of the other experts");
    }
    return scheme;
  }

  /// Of linear layers that a table describes, or by the formats of their tensors.
  std::optional<QuantScheme> shared_scheme() const {
    if (model_.shared_intermediate == 0) return std::nullopt;
    if (layout_.storage.shared) return layout_.storage.shared.scheme;
    return scheme_of_layers(shared_layers(model_, layout_));
  }

  /// By its name from the layer on; undefined for the empty name.
  Tensor tensor(const std::string& name) const { return name.empty() ? Tensor() : read(name); }
  Tensor read(const std::string& name) const {
    return block_.read ? block_.read(name, entry(name)) : entry(name).tensor;
  }
  Tensor expert_tensor(const std::string& pattern) const {
    return pattern.empty() ? Tensor() : tensor(tensor_name(layout_.block, pattern));
  }

  RouterWeights router_weights() const {
    RouterWeights weights;
    weights.weight = tensor(layout_.router);
    weights.bias = tensor(layout_.router_bias);
    if (const Tensor bias = tensor(layout_.correction_bias)) {
      weights.score_correction_bias = bias;
      if (bias.dtype() != DType::kF32 || bias.rank() != 1) {
        weights.score_correction_bias = Tensor::empty({model_.router.num_choices()}, DType::kF32);
        convert(bias.reshape({model_.router.num_choices()}), weights.score_correction_bias);
      }
    }
    return weights;
  }

  ExpertWeights experts() {
    const ExpertLayout& layout = *layout_.experts;
    if (layout.storage == ExpertStorage::kPerExpert) {
      ExpertWeights weights =
          empty_weights(model_.experts_hidden(), model_.intermediate, experts_scheme());
      for (const std::int32_t e : wanted_) {
        add_expert(weights, expert_layers(model_, layout_, e), layout_.storage.experts,
                   model_.has_bias);
      }
      replace_uncalibrated(weights);
      return weights;
    }
    if (layout.storage == ExpertStorage::kStacked && layout.gate_up == GateUpLayout::kGateUp) {
      ExpertWeights weights =
          empty_weights(model_.experts_hidden(), model_.intermediate, experts_scheme());
      Block stacks = block_;
      for (auto& [name, entry] : stacks.tensors) entry.tensor = read(name);
      load_stacks(layout_, stacks, model_.router.num_experts, weights);
      if (!all_) keep_experts(wanted_, weights);
      return weights;
    }
    if (!layout.w3.empty()) return parted_experts();
    ExpertWeights::Stacked stacked;
    stacked.w13 = expert_tensor(layout.w1);
    stacked.w2 = expert_tensor(layout.w2);
    stacked.w13_scales = expert_tensor(layout.w13_scales);
    stacked.w2_scales = expert_tensor(layout.w2_scales);
    stacked.w13_bias = expert_tensor(layout.w13_bias);
    stacked.w2_bias = expert_tensor(layout.w2_bias);
    stacked.gate_up_layout = layout.gate_up;
    stacked.transposed = layout.storage == ExpertStorage::kStackedTransposed;
    const QuantScheme scheme = experts_scheme();
    const auto make = [&](const ExpertWeights::Stacked& from) {
      return ExpertWeights::from_stacked(from, scheme, model_.activation, model_.activation_params);
    };
    return all_ ? make(stacked) : some_of_stacked(stacked, wanted_, make);
  }

  /// Gate and up in tensors of their own, each with all experts.
  ExpertWeights parted_experts() {
    const ExpertLayout& layout = *layout_.experts;
    ExpertWeights weights =
        empty_weights(model_.experts_hidden(), model_.intermediate, experts_scheme());
    const std::array tensors{expert_tensor(layout.w1), expert_tensor(layout.w3),
                             expert_tensor(layout.w2)};
    for (const Tensor& tensor : tensors) weights.owners.push_back(tensor.owner());
    const std::int64_t inner = model_.intermediate;
    const auto matrix = [&](const Tensor& tensor, std::int64_t expert, bool down) {
      TensorView view = layout.storage == ExpertStorage::kRows
                            ? tensor.slice(0, expert * inner, (expert + 1) * inner)
                            : tensor.select(0, expert);
      const bool transposed = layout.storage == ExpertStorage::kStackedTransposed ||
                              (layout.storage == ExpertStorage::kRows && down);
      WeightMatrix result;
      result.values = transposed ? view.transpose(0, 1) : view;
      return result;
    };
    for (const std::int32_t e : wanted_) {
      weights.experts.push_back({matrix(tensors[0], e, false), matrix(tensors[1], e, false),
                                 matrix(tensors[2], e, true)});
    }
    return weights;
  }

  SharedExperts shared_experts() {
    SharedExperts shared;
    shared.weights = empty_weights(model_.hidden, model_.shared_intermediate, *shared_scheme());
    shared.weights.activation = model_.shared_activation;
    shared.weights.activation_params = model_.shared_activation_params;
    add_expert(shared.weights, shared_layers(model_, layout_), layout_.storage.shared, false);
    if (shared_in_one()) split_halves(shared.weights);
    replace_uncalibrated(shared.weights);
    for (const LinearLayer& layer : shared_gate_layer(model_, layout_)) {
      shared.gate = plain_matrix(layer, layout_.storage.shared_gate);
    }
    if (model_.average_with_shared) shared.gate = half_gate();
    return shared;
  }

  bool shared_in_one() const {
    return family_row(model_.family).gated && layout_.shared.up.empty();
  }

  /// The first matrix holds the rows of gate, then those of up.
  static void split_halves(ExpertWeights& weights) {
    ExpertMatrices& expert = weights.experts.front();
    const TensorView both = expert.gate.values;
    const std::int64_t half = both.size(0) / 2;
    expert.gate.values = both.slice(0, 0, half);
    expert.up.values = both.slice(0, half, 2 * half);
  }

  /// A gate whose every sigmoid is one half.
  Tensor half_gate() const {
    Tensor gate = Tensor::empty({1, model_.hidden}, DType::kF32);
    std::fill_n(gate.as<float>(), model_.hidden, 0.0F);
    return gate;
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

  // Gate, up and down, or the first and the last.
  void add_expert(ExpertWeights& weights, const std::vector<LinearLayer>& layers,
                  const LinearStorage& storage, bool has_bias) {
    const auto load = [&](const LinearLayer& layer) {
      WeightMatrix result = matrix(layer, storage, weights.owners);
      if (has_bias) result.bias = view(layer.name + ".bias", weights.owners);
      return result;
    };
    ExpertMatrices expert;
    expert.gate = load(layers.front());
    if (layers.size() == 3) expert.up = load(layers[1]);
    expert.down = load(layers.back());
    weights.experts.push_back(expert);
  }

  /// (out, in), decoded to f32 where it is quantized.
  Tensor plain_matrix(const LinearLayer& layer, const LinearStorage& storage) {
    if (!storage && !entry(layer.name + ".weight").type) {
      const Tensor stored = tensor(layer.name + ".weight");
      return Tensor(stored.reshape({layer.shape.out, layer.shape.in}), stored.owner());
    }
    std::vector<std::shared_ptr<const void>> owners;
    const WeightMatrix quantized = matrix(layer, storage, owners);
    if (problems_.count() > 0) return {};
    const QuantKey key = storage ? storage.scheme.weights : format_of(layer.name + ".weight");
    return dequantize_weights(quantized, key, layer.shape.in);
  }

  WeightMatrix matrix(const LinearLayer& layer, const LinearStorage& storage,
                      std::vector<std::shared_ptr<const void>>& owners) {
    WeightMatrix result;
    if (!storage) {
      BlockTensor stored = entry(layer.name + ".weight");
      if (stored.type) {
        stored.tensor = read(layer.name + ".weight");
        const MatrixStack stack(stored);
        stack.keep_owners(owners);
        return stack.rows(0, layer.shape.out);
      }
      result.values = view(layer.name + ".weight", owners);
      return result;
    }
    const QuantScheme& scheme = storage.scheme;
    for (const StoredTensor& stored : storage.layout->tensors) {
      const std::string name = layer.name + std::string(stored.suffix);
      if (!is_allowed(stored, scheme) || !block_.tensors.contains(name)) continue;
      collect(name,
              [&] { decode(stored, view(name, owners), scheme, layer.shape, result, owners); });
    }
    collect(layer.name, [&] { split_group_scales(scheme.weights, result, owners); });
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
    Tensor tensor = read(name);
    if (owners.empty() || owners.back() != tensor.owner()) owners.push_back(tensor.owner());
    return tensor;
  }

  const ModelConfig& model_;
  const Block& block_;
  const BlockLayout layout_;
  const bool in_gguf_;  ///< with quantized blocks
  Problems problems_;
  std::set<std::string_view> claimed_;
  TensorChecks checks_;
  std::vector<std::int32_t> wanted_;  ///< experts
  const bool all_;                    ///< of them
};

}  // namespace

namespace {

template <typename Function>
auto within(const std::string& label, Function&& function) {
  try {
    return function();
  } catch (const Error& error) {
    if (error.argument() == label) throw;
    throw error.within(label);
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

}  // namespace fusedmoe::checkpoint
