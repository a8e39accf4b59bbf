// config.json -> ModelConfig, driven by the description of the family.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/config_settings.h"
#include "checkpoint/embedded.h"
#include "checkpoint/find_family.h"
#include "checkpoint/layer_formats.h"
#include "checkpoint/model_config.h"
#include "checkpoint/quant_config.h"
#include "checkpoint/unknown_keys.h"
#include "core/check.h"
#include "files/json.h"
#include "files/safetensors_header.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe {
namespace {

using Keys = checkpoint::ConfigKeys;
using checkpoint::FamilyRow;
using checkpoint::kMaxExperts;
using checkpoint::kMaxLayers;
using checkpoint::kMaxWidth;
using checkpoint::Settings;

// A number, or a list with one entry for each layer.
std::int64_t read_num_layers(const FamilyRow& row, const Settings& settings) {
  for (const std::string& key : row.num_layers.keys) {
    const nlohmann::json* value = settings.keys().find(key);
    if (!value) continue;
    if (!value->is_array()) break;
    FUSEDMOE_CHECK_FILE(!value->empty() && std::ssize(*value) <= kMaxLayers,
                        settings.keys().label(key), core::format("{} entries", value->size()),
                        core::format("from 1 to {} entries", kMaxLayers));
    return std::ssize(*value);
  }
  return settings.integer(row.num_layers, 1, kMaxLayers);
}

ScoringFunc parse_scoring(const std::string& text, const std::string& label) {
  constexpr std::array kScorings{ScoringFunc::kSoftmax,      ScoringFunc::kSigmoid,
                                 ScoringFunc::kSqrtSoftplus, ScoringFunc::kTopkSoftmax,
                                 ScoringFunc::kTopkSigmoid,  ScoringFunc::kLogits};
  std::string known;
  for (const ScoringFunc scoring : kScorings) {
    if (name(scoring) == text) return scoring;
    known += (known.empty() ? "" : ", ") + std::string(name(scoring));
  }
  throw Error::unsupported(Reason::kRoutingMethod, label, files::quote(text), "one of " + known);
}

void read_groups(const FamilyRow& row, const Settings& settings, RouterConfig& router) {
  if (row.num_groups.keys.empty() && !settings.given(row.num_groups)) return;
  const std::int64_t choices = router.num_choices();
  const std::int64_t groups = settings.integer(row.num_groups, 0, choices);
  if (groups == 0) return;
  router.num_expert_group = groups;
  router.topk_group = settings.integer(row.topk_group, 1, groups);
  FUSEDMOE_CHECK_FILE(choices % groups == 0, settings.label(row.num_groups),
                      core::to_string(groups),
                      core::format("a divisor of the {} experts", choices));
  const std::int64_t reachable = router.topk_group * (choices / groups);
  FUSEDMOE_CHECK_FILE(router.topk <= reachable, settings.label(row.topk_group),
                      core::to_string(router.topk_group),
                      core::format("enough groups for {} experts per token", router.topk));
  FUSEDMOE_CHECK_SUPPORTED(!row.group_score_of_two || groups == 1, kRoutingMethod,
                           settings.label(row.num_groups), core::to_string(groups),
                           "1: groups that are scored by two experts need a correction bias");
}

// DeepSeek names the method instead: it decides on groups and bias.
void read_method(const FamilyRow& row, const Settings& settings, ModelConfig& model) {
  constexpr std::array<std::string_view, 3> kMethods{"greedy", "group_limited_greedy", "noaux_tc"};
  const std::string method = settings.string(*row.topk_method);
  FUSEDMOE_CHECK_SUPPORTED(std::find(kMethods.begin(), kMethods.end(), method) != kMethods.end(),
                           kRoutingMethod, settings.label(*row.topk_method), files::quote(method),
                           "greedy, group_limited_greedy or noaux_tc");
  model.has_correction_bias = method == "noaux_tc";
  if (method != "greedy") read_groups(row, settings, model.router);
}

void set_router(const FamilyRow& row, const Settings& settings, ModelConfig& model) {
  RouterConfig& router = model.router;
  router.num_experts = settings.integer(row.num_experts, 1, kMaxExperts);
  router.num_zero_experts =
      settings.integer(row.zero_experts, 0, kMaxExperts - router.num_experts, 0);
  router.topk = settings.integer(row.topk, 1, router.num_choices());
  router.scoring = parse_scoring(settings.string(row.scoring), settings.label(row.scoring));
  router.renormalize = settings.boolean(row.renormalize);
  router.renormalize_epsilon = row.renormalize_epsilon;
  router.routed_scaling_factor = settings.number(row.scaling, 1);
  router.apply_router_weight_on_input = row.weight_on_input;
  FUSEDMOE_CHECK_FILE(!row.weight_on_input || router.topk == 1, settings.label(row.topk),
                      core::to_string(router.topk),
                      core::format("1 for {}, whose router weight enters the experts", row.name));
  model.has_router_bias = !row.router_bias.empty();
  if (row.topk_method) {
    read_method(row, settings, model);
  } else {
    model.has_correction_bias =
        !row.correction_bias.empty() && settings.boolean(row.has_correction_bias, true);
    read_groups(row, settings, router);
  }
  if (!settings.given(row.sparsemixer)) return;
  FUSEDMOE_CHECK_SUPPORTED(router.topk == 2, kRoutingMethod, settings.label(row.topk),
                           core::to_string(router.topk), "2 for sparsemixer");
  router.scoring = ScoringFunc::kSparsemixer;
  router.sparsemixer_jitter = settings.number(row.sparsemixer, 0);
}

Activation activation_of(const FamilyRow& row, const Settings& settings) {
  const std::string act = settings.string(row.activation);
  constexpr std::array<std::pair<std::string_view, Activation>, 5> kGated{{
      {"silu", Activation::kSilu},
      {"swish", Activation::kSilu},
      {"gelu", Activation::kGelu},
      {"gelu_pytorch_tanh", Activation::kGeluTanh},
      {"gelu_tanh", Activation::kGeluTanh},
  }};
  const auto* found = std::find_if(kGated.begin(), kGated.end(),
                                   [&](const auto& entry) { return entry.first == act; });
  std::optional<Activation> activation;
  if (found != kGated.end()) activation = found->second;
  for (const Activation ours :
       {Activation::kSwigluOai, Activation::kSwigluOaiUninterleave, Activation::kSwigluStep,
        Activation::kSiluNoMul, Activation::kGeluNoMul, Activation::kGeluTanhNoMul,
        Activation::kRelu2NoMul}) {
    if (act == name(ours)) activation = ours;
  }
  FUSEDMOE_CHECK_SUPPORTED(activation, kActivation, settings.label(row.activation),
                           files::quote(act), "silu, gelu or gelu_pytorch_tanh");
  FUSEDMOE_CHECK_SUPPORTED(is_gated(*activation) == row.gated, kActivation,
                           settings.label(row.activation), files::quote(act),
                           row.gated ? "one with a gate" : "one without a gate");
  return *activation;
}

void set_activation(const FamilyRow& row, const Settings& settings, ModelConfig& model) {
  const Activation activation = activation_of(row, settings);
  ActivationParams params;
  const auto parameter = [&](const checkpoint::Setting<float>& setting,
                             std::optional<float>& value) {
    if (settings.given(setting)) value = settings.number(setting, 0);
  };
  parameter(row.alpha, params.alpha);
  parameter(row.beta, params.beta);
  const auto with = [&](std::optional<float> limit, Activation& kind, ActivationParams& all) {
    kind = limit && !row.limited.empty() ? parse_activation(row.limited) : activation;
    all = params;
    all.limit = limit;
    resolve(kind, all);
  };
  const std::optional<float> limit = settings.limit(row.limit);
  with(limit, model.activation, model.activation_params);
  with(row.same_limit ? limit : settings.limit(row.shared_limit), model.shared_activation,
       model.shared_activation_params);
}

void set_shared(const FamilyRow& row, const Settings& settings, ModelConfig& model) {
  if (row.shared.empty()) return;
  const bool as_expert = !settings.given(row.shared_width) && row.shared_width.keys.empty();
  const std::int64_t width =
      as_expert ? model.intermediate : settings.integer(row.shared_width, 0, kMaxWidth);
  const std::int64_t count =
      settings.integer(row.shared_count, 0, width > 0 ? kMaxWidth / width : kMaxWidth, 1);
  model.shared_intermediate = count * width;
  model.shared_expert_gate = model.shared_intermediate > 0 && !row.shared_gate.empty();
  if (model.shared_intermediate == 0 || !settings.boolean(row.average_with_shared, false)) return;
  model.average_with_shared = true;
  model.router.routed_scaling_factor /= 2;
}

// Tools that rotate a model without quantizing it say so beside its own keys: what its layers get
// is rotated at run time, and no tensor tells.
void check_rotation(const Keys& keys) {
  for (const char* key : {"rotation_config", "spinquant_config", "transform_config"}) {
    const nlohmann::json* value = keys.find(key);
    if (!value || value->empty() || *value == false) continue;
    throw Error::unsupported(
        Reason::kModel, keys.label(key),
        core::format("{} is {}: inputs of layers are transformed at run time, which nothing here "
                     "computes",
                     keys.label(key), Keys::text(*value)));
  }
}

// A quantized model may name another type, which then says nothing of plain weights.
QuantScheme plain_scheme(const Keys& keys, bool quantized) {
  const std::string dtype = keys.string("dtype", keys.string("torch_dtype", "bfloat16"));
  const std::optional<DType> parsed = parse_dtype(dtype);
  const bool known = parsed == DType::kBF16 || parsed == DType::kF16 || parsed == DType::kF32;
  FUSEDMOE_CHECK_SUPPORTED(known || quantized, kDType, "config.dtype", files::quote(dtype),
                           "bfloat16, float16 or float32");
  return schemes::unquantized(known ? *parsed : DType::kBF16);
}

}  // namespace

namespace checkpoint {

ParsedConfig::ParsedConfig(std::string_view config_json, const Family& family)
    : root_(std::make_shared<nlohmann::json>(
          files::parse_json_object(config_json, files::kMaxConfigBytes, "config"))) {
  // Older compressed-tensors and mlx have names of their own for it.
  constexpr std::array<const char*, 3> kKeys{"quantization_config", "compression_config",
                                             "quantization"};
  FoundFamily found = find_family_of(*root_, family.row());
  row_ = std::move(found.row);
  node_ = found.node;
  const Keys keys(*node_);
  check_rotation(Keys(*root_));
  check_rotation(keys);
  check_unknown_keys(*row_, keys);
  if (node_ != root_.get()) check_unknown_keys(*row_, Keys(*root_));
  std::optional<Keys> quantization;
  for (const char* key : kKeys) {
    for (const Keys& object : {Keys(*root_), keys}) {
      const std::optional<Keys> given = object.object(key);
      if (!given) continue;
      if (!quantization) quantization = given;
      FUSEDMOE_CHECK_FILE(given->node() == quantization->node(), given->path(),
                          "something else than " + quantization->path(),
                          "the same: both say how the weights are quantized");
    }
  }
  plain_ = plain_scheme(keys, quantization.has_value());
  if (!quantization) return;
  const Keys& says = quantization->find("expert_dtype") ? *quantization : keys;
  quantization_ = std::make_shared<QuantRules>(
      parse_quantization(*quantization, key_order(config_json), says.string("expert_dtype", "")));
  if (node_ != root_.get()) return;
  for (const char* key : kKeys) root_->erase(key);
}

// The keys of a scheme are data: schemes without an implementation are described all the same, so
// that a selection can say what it lacks.
ModelConfig ParsedConfig::read(std::optional<std::int64_t> layer) const {
  const FamilyRow& row = *row_;
  const Settings settings(Keys(*node_), layer);
  check_requirements(row, settings);
  ModelConfig model;
  model.family = Family(row_);
  model.num_layers = read_num_layers(row, settings);
  model.hidden = settings.integer(row.hidden, 1, kMaxWidth);
  model.intermediate = settings.integer(row.intermediate, 1, kMaxWidth);
  model.latent = settings.integer(row.latent_width, 0, kMaxWidth, 0);
  model.has_bias = std::any_of(row.layouts.begin(), row.layouts.end(),
                               [](const ExpertLayout& layout) { return !layout.w2_bias.empty(); });
  set_router(row, settings, model);
  set_activation(row, settings, model);
  set_shared(row, settings, model);
  model.scheme = plain_;
  model.quantization = quantization_;
  if (quantization_) model.layout = quantization_->layout;
  return model;
}

std::string ParsedConfig::label(const std::vector<std::string>& keys) const {
  return Settings(Keys(*node_)).label_of(keys);
}

ModelConfig ParsedConfig::read_all() const {
  ModelConfig model = read(std::nullopt);
  if (const auto scheme = configured_scheme(model)) {
    model.scheme = *scheme;
  } else {
    model.layout = CheckpointLayout::kPlain;
  }
  return model;
}

}  // namespace checkpoint

ModelConfig parse_model_config(std::string_view config_json, const Family& family) {
  return checkpoint::ParsedConfig(config_json, family).read_all();
}

MoeConfig moe_config(const ModelConfig& model, DType dtype, Device device) {
  MoeConfig config;
  config.num_experts = model.router.num_experts;
  config.num_local_experts = model.router.num_experts;
  config.topk = model.router.topk;
  config.hidden = model.experts_hidden();
  config.intermediate = model.intermediate;
  config.dtype = dtype;
  config.scheme = model.scheme;
  config.activation = model.activation;
  config.activation_params = model.activation_params;
  config.has_bias = model.has_bias;
  config.apply_router_weight_on_input = model.router.apply_router_weight_on_input;
  if (model.latent == 0) config.routing_method = routing_method(model.router);
  config.device = device;
  return config;
}

namespace {

/// config.json of well-known models, cut down to what concerns their MoE layers. deepseek-v3 is
/// published in FP8; its preset leaves the quantization out and stands for the same model in bf16.
const nlohmann::ordered_json& presets() {
  static const auto json = nlohmann::ordered_json::parse(checkpoint::embedded_text("presets.json"));
  return json;
}

}  // namespace

std::string model_preset(std::string_view model) {
  const auto found = presets().find(std::string(model));
  if (found != presets().end()) return found->dump(2) + "\n";
  throw Error::unknown_name("model", model, core::join(model_preset_names(), ", "));
}

std::vector<std::string> model_preset_names() {
  std::vector<std::string> names;
  for (const auto& [name, config] : presets().items()) names.push_back(name);
  return names;
}

}  // namespace fusedmoe
