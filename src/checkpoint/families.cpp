// Sources: published checkpoints and the model definitions of Hugging Face transformers.
#include "checkpoint/families.h"

#include <array>

#include "core/check.h"

namespace fusedmoe::checkpoint {
namespace {

using enum ExpertStorage;

constexpr std::array<std::string_view, 1> kMlp{"mlp"};
constexpr std::array<std::string_view, 1> kFeedForward{"feed_forward"};
constexpr std::array<std::string_view, 2> kBlockSparseMoe{"block_sparse_moe", "mlp"};

constexpr ExpertLayout kFused{.storage = kStacked,
                              .gate_up = GateUpLayout::kGateUp,
                              .w1 = "experts.gate_up_proj",
                              .w2 = "experts.down_proj"};

// Also what quantization tools make of families that publish stacked tensors.
constexpr ExpertLayout kPerProjection{.storage = kPerExpert,
                                      .gate_up = GateUpLayout::kGateUp,
                                      .w1 = "experts.*.gate_proj",
                                      .w3 = "experts.*.up_proj",
                                      .w2 = "experts.*.down_proj"};

constexpr std::array<ExpertLayout, 2> kProjections{kPerProjection, kFused};

constexpr std::array<ExpertLayout, 2> kMixtralExperts{{{.storage = kPerExpert,
                                                        .gate_up = GateUpLayout::kGateUp,
                                                        .w1 = "experts.*.w1",
                                                        .w3 = "experts.*.w3",
                                                        .w2 = "experts.*.w2"},
                                                       kFused}};

constexpr std::array<ExpertLayout, 3> kGptOssExperts{{{.storage = kMxfp4,
                                                       .gate_up = GateUpLayout::kInterleaved,
                                                       .w1 = "experts.gate_up_proj_blocks",
                                                       .w2 = "experts.down_proj_blocks",
                                                       .w13_scales = "experts.gate_up_proj_scales",
                                                       .w2_scales = "experts.down_proj_scales",
                                                       .w13_bias = "experts.gate_up_proj_bias",
                                                       .w2_bias = "experts.down_proj_bias"},
                                                      {.storage = kStackedTransposed,
                                                       .gate_up = GateUpLayout::kInterleaved,
                                                       .w1 = "experts.gate_up_proj",
                                                       .w2 = "experts.down_proj",
                                                       .w13_bias = "experts.gate_up_proj_bias",
                                                       .w2_bias = "experts.down_proj_bias"},
                                                      kPerProjection}};

constexpr std::array<ExpertLayout, 2> kLlama4Experts{{{.storage = kStackedTransposed,
                                                       .gate_up = GateUpLayout::kGateUp,
                                                       .w1 = "experts.gate_up_proj",
                                                       .w2 = "experts.down_proj"},
                                                      kPerProjection}};

constexpr std::array<ExpertLayout, 2> kGraniteExperts{{{.storage = kStacked,
                                                        .gate_up = GateUpLayout::kGateUp,
                                                        .w1 = "input_linear.weight",
                                                        .w2 = "output_linear.weight"},
                                                       kPerProjection}};

constexpr std::array<FamilyRow, 10> kTable{{
    {.family = Family::kGptOss,
     .model_type = "gpt_oss",
     .text_type = "gpt_oss",
     .prefix = "model.layers.",
     .blocks = kMlp,
     .layouts = kGptOssExperts,
     .router = "router.weight",
     .router_bias = "router.bias",
     .intermediate_key = "intermediate_size",
     .scoring = ScoringFunc::kTopkSoftmax,
     .swiglu_oai = true},
    {.family = Family::kMixtral,
     .model_type = "mixtral",
     .text_type = "mixtral",
     .prefix = "model.layers.",
     .blocks = kBlockSparseMoe,
     .layouts = kMixtralExperts,
     .router = "gate.weight",
     .intermediate_key = "intermediate_size",
     .renormalize = Renormalize::kAlways},
    {.family = Family::kQwen2Moe,
     .model_type = "qwen2_moe",
     .text_type = "qwen2_moe",
     .prefix = "model.layers.",
     .blocks = kMlp,
     .layouts = kProjections,
     .router = "gate.weight",
     .shared = "shared_expert",
     .shared_gate = "shared_expert_gate.weight",
     .intermediate_key = "moe_intermediate_size",
     .shared_width = SharedWidth::kOwnKey,
     .renormalize = Renormalize::kKeyElseNever},
    {.family = Family::kQwen3Moe,
     .model_type = "qwen3_moe",
     .text_type = "qwen3_moe",
     .prefix = "model.layers.",
     .blocks = kMlp,
     .layouts = kProjections,
     .router = "gate.weight",
     .intermediate_key = "moe_intermediate_size",
     .renormalize = Renormalize::kKeyElseNever},
    {.family = Family::kDeepseekV2,
     .model_type = "deepseek_v2",
     .text_type = "deepseek_v2",
     .prefix = "model.layers.",
     .blocks = kMlp,
     .layouts = kProjections,
     .router = "gate.weight",
     .correction_bias = "gate.e_score_correction_bias",
     .shared = "shared_experts",
     .intermediate_key = "moe_intermediate_size",
     .shared_width = SharedWidth::kCountTimesExpert,
     .renormalize = Renormalize::kKeyElseNever,
     .topk_method = "greedy"},
    {.family = Family::kDeepseekV3,
     .model_type = "deepseek_v3",
     .text_type = "deepseek_v3",
     .prefix = "model.layers.",
     .blocks = kMlp,
     .layouts = kProjections,
     .router = "gate.weight",
     .correction_bias = "gate.e_score_correction_bias",
     .shared = "shared_experts",
     .intermediate_key = "moe_intermediate_size",
     .shared_width = SharedWidth::kCountTimesExpert,
     .scoring = ScoringFunc::kSigmoid,
     .renormalize = Renormalize::kKeyElseAlways,
     .topk_method = "noaux_tc"},
    {.family = Family::kLlama4,
     .model_type = "llama4",
     .text_type = "llama4_text",
     .prefix = "language_model.model.layers.",
     .blocks = kFeedForward,
     .layouts = kLlama4Experts,
     .router = "router.weight",
     .shared = "shared_expert",
     .intermediate_key = "intermediate_size",
     .shared_width = SharedWidth::kSameAsExpert,
     .scoring = ScoringFunc::kTopkSigmoid,
     .weight_on_input = true},
    {.family = Family::kOlmoe,
     .model_type = "olmoe",
     .text_type = "olmoe",
     .prefix = "model.layers.",
     .blocks = kMlp,
     .layouts = kProjections,
     .router = "gate.weight",
     .intermediate_key = "intermediate_size",
     .renormalize = Renormalize::kKeyElseNever},
    {.family = Family::kGraniteMoe,
     .model_type = "granitemoe",
     .text_type = "granitemoe",
     .prefix = "model.layers.",
     .blocks = kBlockSparseMoe,
     .layouts = kGraniteExperts,
     .router = "router.layer.weight",
     .intermediate_key = "intermediate_size",
     .scoring = ScoringFunc::kTopkSoftmax},
    {.family = Family::kGlm4Moe,
     .model_type = "glm4_moe",
     .text_type = "glm4_moe",
     .prefix = "model.layers.",
     .blocks = kMlp,
     .layouts = kProjections,
     .router = "gate.weight",
     .correction_bias = "gate.e_score_correction_bias",
     .shared = "shared_experts",
     .intermediate_key = "moe_intermediate_size",
     .shared_width = SharedWidth::kCountTimesExpert,
     .scoring = ScoringFunc::kSigmoid,
     .renormalize = Renormalize::kKeyElseAlways,
     .topk_method = "noaux_tc"},
}};

void add_linear(const LinearLayer& layer, const LinearLayout* layout, const QuantScheme& scheme,
                TensorRole role, std::vector<TensorSpec>& specs) {
  for (TensorSpec& spec : linear_tensors(layer, layout, scheme, role)) {
    specs.push_back(std::move(spec));
  }
}

void add_experts(const ModelConfig& model, std::string_view block, const ExpertLayout& layout,
                 const LinearLayout* linear, std::vector<TensorSpec>& specs) {
  constexpr std::int64_t kBlock = 32;
  const std::int64_t experts = model.router.num_experts, hidden = model.hidden,
                     inner = model.intermediate;
  const auto add = [&](std::string_view pattern, Shape shape, TensorRole role,
                       std::int64_t fan_in) {
    if (pattern.empty()) return;
    specs.push_back({tensor_name(block, pattern), shape, role, fan_in});
  };
  switch (layout.storage) {
    case kPerExpert:
      for (std::int64_t e = 0; e < experts; ++e) {
        for (const LinearLayer& layer : expert_layers(model, block, layout, e)) {
          add_linear(layer, linear, model.scheme, TensorRole::kExpertWeight, specs);
          if (!model.has_bias) continue;
          specs.push_back(
              {layer.name + ".bias", {layer.shape.out}, TensorRole::kExpertBias, layer.shape.in});
        }
      }
      break;
    case kStacked:
      add(layout.w1, {experts, 2 * inner, hidden}, TensorRole::kExpertWeight, hidden);
      add(layout.w2, {experts, hidden, inner}, TensorRole::kExpertWeight, inner);
      break;
    case kStackedTransposed:
      add(layout.w1, {experts, hidden, 2 * inner}, TensorRole::kExpertWeight, hidden);
      add(layout.w2, {experts, inner, hidden}, TensorRole::kExpertWeight, inner);
      break;
    case kMxfp4:
      FUSEDMOE_CHECK_FILE(hidden % kBlock == 0 && inner % kBlock == 0, "config",
                          core::format("hidden_size {} and expert width {}", hidden, inner),
                          "multiples of 32 for MXFP4");
      add(layout.w1, {experts, 2 * inner, hidden / kBlock, kBlock / 2}, TensorRole::kMxfp4Blocks,
          hidden);
      add(layout.w13_scales, {experts, 2 * inner, hidden / kBlock}, TensorRole::kMxfp4Scales,
          hidden);
      add(layout.w2, {experts, hidden, inner / kBlock, kBlock / 2}, TensorRole::kMxfp4Blocks,
          inner);
      add(layout.w2_scales, {experts, hidden, inner / kBlock}, TensorRole::kMxfp4Scales, inner);
      break;
  }
  add(layout.w13_bias, {experts, 2 * inner}, TensorRole::kExpertBias, hidden);
  add(layout.w2_bias, {experts, hidden}, TensorRole::kExpertBias, inner);
}

}  // namespace

std::span<const FamilyRow> family_table() {
  return kTable;
}

const FamilyRow& family_row(Family family) {
  for (const FamilyRow& row : kTable) {
    if (row.family == family) return row;
  }
  throw Error("family", core::to_string(static_cast<int>(family)), "a value of Family");
}

std::string tensor_name(std::string_view block, std::string_view pattern, std::int64_t expert) {
  std::string result = core::format("{}.", block);
  for (const char c : pattern) {
    if (c == '*') {
      result += core::to_string(expert);
    } else {
      result += c;
    }
  }
  return result;
}

std::array<LinearLayer, 3> expert_layers(const ModelConfig& model, std::string_view block,
                                         const ExpertLayout& layout, std::int64_t expert) {
  const std::int64_t hidden = model.hidden, inner = model.intermediate;
  return {{{tensor_name(block, layout.w1, expert), {inner, hidden}},
           {tensor_name(block, layout.w3, expert), {inner, hidden}},
           {tensor_name(block, layout.w2, expert), {hidden, inner}}}};
}

std::array<LinearLayer, 3> shared_layers(const ModelConfig& model, std::string_view block) {
  const std::int64_t hidden = model.hidden, inner = model.shared_intermediate;
  const std::string prefix = core::format("{}.{}", block, family_row(model.family).shared);
  return {{{prefix + ".gate_proj", {inner, hidden}},
           {prefix + ".up_proj", {inner, hidden}},
           {prefix + ".down_proj", {hidden, inner}}}};
}

std::vector<TensorSpec> linear_tensors(const LinearLayer& layer, const LinearLayout* layout,
                                       const QuantScheme& scheme, TensorRole role) {
  const auto [out, in] = layer.shape;
  if (!layout) return {{layer.name + ".weight", {out, in}, role, in}};
  std::vector<TensorSpec> specs;
  for (const StoredTensor& stored : layout->tensors) {
    if (!is_allowed(stored, scheme)) continue;
    specs.push_back({layer.name + std::string(stored.suffix),
                     stored_shape(stored, scheme.weights, layer.shape), TensorRole::kQuantized, in,
                     &stored, is_required(stored, scheme)});
  }
  return specs;
}

std::vector<TensorSpec> block_tensors(const ModelConfig& model, std::string_view block,
                                      const ExpertLayout& layout, const BlockStorage& storage) {
  const FamilyRow& row = family_row(model.family);
  const std::int64_t experts = model.router.num_experts, hidden = model.hidden;
  std::vector<TensorSpec> specs;
  const auto add = [&](std::string_view pattern, Shape shape, TensorRole role,
                       std::int64_t fan_in) {
    specs.push_back({tensor_name(block, pattern), shape, role, fan_in});
  };
  add(row.router, {experts, hidden}, TensorRole::kRouterWeight, hidden);
  if (model.has_bias) add(row.router_bias, {experts}, TensorRole::kRouterBias, hidden);
  if (model.has_correction_bias) {
    add(row.correction_bias, {experts}, TensorRole::kCorrectionBias, hidden);
  }
  add_experts(model, block, layout, storage.experts, specs);
  if (model.shared_intermediate > 0) {
    for (const LinearLayer& layer : shared_layers(model, block)) {
      add_linear(layer, storage.shared, model.scheme, TensorRole::kSharedWeight, specs);
    }
  }
  if (model.shared_expert_gate) {
    add(row.shared_gate, {1, hidden}, TensorRole::kSharedGate, hidden);
  }
  return specs;
}

const ExpertLayout& published_layout(const ModelConfig& model) {
  const bool mxfp4 = model.layout == CheckpointLayout::kGptOss;
  const FamilyRow& row = family_row(model.family);
  for (const ExpertLayout& layout : row.layouts) {
    if ((layout.storage == kMxfp4) == mxfp4) return layout;
  }
  throw Error::unsupported(Reason::kQuantScheme, "scheme", name(model.scheme),
                           core::format("one that {} is published in", row.model_type));
}

}  // namespace fusedmoe::checkpoint

namespace fusedmoe {

std::string_view name(Family family) {
  return checkpoint::family_row(family).model_type;
}

}  // namespace fusedmoe
