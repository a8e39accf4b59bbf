// config.json -> ModelConfig, driven by the family table.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/config_keys.h"
#include "checkpoint/families.h"
#include "checkpoint/quant_config.h"
#include "core/check.h"
#include "files/json.h"
#include "files/safetensors_header.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe {
namespace {

using Keys = checkpoint::ConfigKeys;
using checkpoint::FamilyRow;
using checkpoint::Renormalize;
using checkpoint::SharedWidth;

// Far above any model, and small enough that no size computed from them overflows 63 bits.
constexpr std::int64_t kMaxWidth = std::int64_t{1} << 18;
constexpr std::int64_t kMaxExperts = RouterConfig::kMaxExperts;
constexpr std::int64_t kMaxLayers = std::int64_t{1} << 10;

const FamilyRow* find_row(std::string_view model_type) {
  for (const FamilyRow& row : checkpoint::family_table()) {
    if (row.model_type == model_type || row.text_type == model_type) return &row;
  }
  return nullptr;
}

struct Source {
  const FamilyRow& row;
  const nlohmann::json& node;  ///< the object that holds the text model's keys
};

// Multimodal models keep the language model's keys in `text_config`.
Source find_source(const nlohmann::json& root) {
  const Keys keys(root);
  const nlohmann::json* nested = keys.find("text_config");
  FUSEDMOE_CHECK_FILE(!nested || nested->is_object(), "config.text_config", Keys::text(*nested),
                      "an object");
  std::string types = keys.string("model_type", "");
  if (nested) {
    const std::string nested_type = Keys(*nested).string("model_type", "");
    if (const FamilyRow* row = find_row(nested_type)) return {*row, *nested};
    if (const FamilyRow* row = find_row(types)) return {*row, *nested};
    types += " with text_config of " + nested_type;
  } else if (const FamilyRow* row = find_row(types)) {
    return {*row, root};
  }
  std::string known;
  for (const FamilyRow& row : checkpoint::family_table()) {
    known += (known.empty() ? "" : ", ") + std::string(row.model_type);
  }
  throw Error::unsupported(Reason::kModel, "config.model_type", files::quote(types),
                           "one of " + known);
}

void read_grouping(const FamilyRow& row, const Keys& keys, ModelConfig& model) {
  constexpr std::array<std::string_view, 3> kMethods{"greedy", "group_limited_greedy", "noaux_tc"};
  const std::string method = keys.string("topk_method", row.topk_method);
  FUSEDMOE_CHECK_SUPPORTED(std::find(kMethods.begin(), kMethods.end(), method) != kMethods.end(),
                           kRoutingMethod, "config.topk_method", files::quote(method),
                           "greedy, group_limited_greedy or noaux_tc");
  const bool sigmoid = row.scoring == ScoringFunc::kSigmoid;
  const std::string scoring = keys.string("scoring_func", sigmoid ? "sigmoid" : "softmax");
  FUSEDMOE_CHECK_SUPPORTED(scoring == "sigmoid" || scoring == "softmax", kRoutingMethod,
                           "config.scoring_func", files::quote(scoring), "softmax or sigmoid");

  RouterConfig& router = model.router;
  router.scoring = scoring == "sigmoid" ? ScoringFunc::kSigmoid : ScoringFunc::kSoftmax;
  router.routed_scaling_factor = keys.number("routed_scaling_factor", 1);
  model.has_correction_bias = method == "noaux_tc";
  if (method == "greedy") return;
  router.num_expert_group = keys.integer("n_group", 1, router.num_experts);
  router.topk_group = keys.integer("topk_group", 1, router.num_expert_group);
  FUSEDMOE_CHECK_FILE(router.num_experts % router.num_expert_group == 0, "config.n_group",
                      core::to_string(router.num_expert_group),
                      core::format("a divisor of the {} experts", router.num_experts));
  const std::int64_t reachable = router.topk_group * (router.num_experts / router.num_expert_group);
  FUSEDMOE_CHECK_FILE(router.topk <= reachable, "config.topk_group",
                      core::to_string(router.topk_group),
                      core::format("enough groups for {} experts per token", router.topk));
}

void read_router(const FamilyRow& row, const Keys& keys, ModelConfig& model) {
  // One of three names, by family and by version of transformers.
  std::string_view count_key = "num_local_experts";
  for (std::string_view key : {"num_local_experts", "num_experts", "n_routed_experts"}) {
    if (keys.find(key)) count_key = key;
  }
  RouterConfig& router = model.router;
  router.num_experts = keys.integer(count_key, 1, kMaxExperts);
  router.topk = keys.integer("num_experts_per_tok", 1, router.num_experts);
  router.scoring = row.scoring;
  router.apply_router_weight_on_input = row.weight_on_input;
  FUSEDMOE_CHECK_FILE(
      !row.weight_on_input || router.topk == 1, "config.num_experts_per_tok",
      core::to_string(router.topk),
      core::format("1 for {}, whose router weight enters the experts", row.model_type));
  switch (row.renormalize) {
    case Renormalize::kNever:
      break;
    case Renormalize::kAlways:
      router.renormalize = true;
      break;
    case Renormalize::kKeyElseNever:
      router.renormalize = keys.boolean("norm_topk_prob", false);
      break;
    case Renormalize::kKeyElseAlways:
      router.renormalize = keys.boolean("norm_topk_prob", true);
      break;
  }
  if (!row.topk_method.empty()) read_grouping(row, keys, model);
}

void read_activation(const FamilyRow& row, const Keys& keys, ModelConfig& model) {
  if (row.swiglu_oai) {
    model.activation = Activation::kSwigluOai;
    const float limit = keys.number("swiglu_limit", 7);
    FUSEDMOE_CHECK_FILE(limit > 0, "config.swiglu_limit", core::to_string(limit), "positive");
    model.activation_params.limit = limit;
    return;
  }
  const std::string act = keys.string("hidden_act", "silu");
  FUSEDMOE_CHECK_SUPPORTED(act == "silu" || act == "gelu" || act == "gelu_pytorch_tanh",
                           kActivation, "config.hidden_act", files::quote(act),
                           "silu, gelu or gelu_pytorch_tanh");
  model.activation = parse_activation(act);
}

void read_shared(const FamilyRow& row, const Keys& keys, ModelConfig& model) {
  switch (row.shared_width) {
    case SharedWidth::kNone:
      return;
    case SharedWidth::kCountTimesExpert:
      model.shared_intermediate =
          keys.integer("n_shared_experts", 0, kMaxWidth / model.intermediate, 0) *
          model.intermediate;
      break;
    case SharedWidth::kOwnKey:
      model.shared_intermediate = keys.integer("shared_expert_intermediate_size", 0, kMaxWidth);
      break;
    case SharedWidth::kSameAsExpert:
      model.shared_intermediate = model.intermediate;
      break;
  }
  model.shared_expert_gate = model.shared_intermediate > 0 && !row.shared_gate.empty();
}

// The keys of a scheme are data: schemes without an implementation are described all the same, so
// that a selection can say what it lacks.
void read_scheme(const Keys& root, const Keys& keys, ModelConfig& model) {
  std::optional<Keys> quantization = root.object("quantization_config");
  if (!quantization) quantization = keys.object("quantization_config");
  if (quantization) {
    const checkpoint::StoredQuantization stored = checkpoint::parse_quantization(*quantization);
    model.layout = stored.layout;
    model.scheme = stored.scheme;
    return;
  }
  const std::string dtype = keys.string("dtype", keys.string("torch_dtype", "bfloat16"));
  const std::optional<DType> parsed = parse_dtype(dtype);
  FUSEDMOE_CHECK_SUPPORTED(parsed == DType::kBF16 || parsed == DType::kF16 || parsed == DType::kF32,
                           kDType, "config.dtype", files::quote(dtype),
                           "bfloat16, float16 or float32");
  model.scheme = schemes::unquantized(*parsed);
}

}  // namespace

ModelConfig parse_model_config(std::string_view config_json) {
  const nlohmann::json root =
      files::parse_json_object(config_json, files::kMaxConfigBytes, "config");
  const auto [row, node] = find_source(root);
  const Keys keys(node);
  ModelConfig model;
  model.family = row.family;
  model.num_layers = keys.integer("num_hidden_layers", 1, kMaxLayers);
  model.hidden = keys.integer("hidden_size", 1, kMaxWidth);
  model.intermediate = keys.integer(row.intermediate_key, 1, kMaxWidth);
  model.has_bias = !row.router_bias.empty();
  read_router(row, keys, model);
  read_activation(row, keys, model);
  read_shared(row, keys, model);
  read_scheme(Keys(root), keys, model);
  return model;
}

MoeConfig moe_config(const ModelConfig& model, DType dtype, Device device) {
  MoeConfig config;
  config.num_experts = model.router.num_experts;
  config.num_local_experts = model.router.num_experts;
  config.topk = model.router.topk;
  config.hidden = model.hidden;
  config.intermediate = model.intermediate;
  config.dtype = dtype;
  config.scheme = model.scheme;
  config.activation = model.activation;
  config.activation_params = model.activation_params;
  config.has_bias = model.has_bias;
  config.apply_router_weight_on_input = model.router.apply_router_weight_on_input;
  config.routing_method = routing_method(model.router);
  config.device = device;
  return config;
}

}  // namespace fusedmoe
