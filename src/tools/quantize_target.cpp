#include "tools/quantize_target.h"

#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint/config_keys.h"
#include "checkpoint/layer_formats.h"
#include "checkpoint/quant_config.h"
#include "core/check.h"
#include "fusedmoe/quant.h"

namespace fusedmoe {

ModelConfig target_model(const checkpoint::OpenedCheckpoint& source, const QuantScheme& scheme,
                         std::optional<CheckpointLayout> layout, MxScaleRule scale_rule) {
  FUSEDMOE_CHECK_SUPPORTED(!source.files.files.front().gguf, kModel, source.label, "a GGUF file",
                           "safetensors: take the checkpoint it was made from");
  ModelConfig model = source.config;
  model.scheme = scheme;
  FUSEDMOE_CHECK(model.scheme.weights.quantized(), "scheme", name(model.scheme), "a quantized one");
  model.layout = layout.value_or(checkpoint::usual_layout(model.family, model.scheme));
  const std::string text = name(model.scheme);
  FUSEDMOE_CHECK(text.find(':') == std::string::npos, "scheme", text,
                 "without a scale rule of the activations, which no layout can store");
  FUSEDMOE_CHECK(scale_rule == MxScaleRule::kOcp || model.scheme.weights.scale == DType::kE8M0,
                 "scale_rule", std::string(name(scale_rule)),
                 "ocp, for weights without E8M0 scales");
  const auto config = checkpoint::quantization_config({model.layout, model.scheme}, {});
  FUSEDMOE_CHECK_SUPPORTED(config || layout, kQuantScheme, "scheme", name(model.scheme),
                           "one that is written: only GGUF files hold this one");
  FUSEDMOE_CHECK(config, "layout", std::string(name(model.layout)),
                 core::format("one that can hold {}, such as {}", name(model.scheme),
                              name(checkpoint::usual_layout(model.family, model.scheme))));
  // Readers take the scale rule of the activations from the layout.
  model.quantization = std::make_shared<checkpoint::QuantRules>(
      checkpoint::parse_quantization(checkpoint::ConfigKeys(*config)));
  model.scheme = checkpoint::configured_scheme(model).value();
  return model;
}

void check_groups(const ModelConfig& model) {
  const std::int64_t group = model.scheme.weights.group.cols;
  const bool any = model.layout == CheckpointLayout::kFp8 ||
                   model.layout == CheckpointLayout::kGptOss ||
                   model.layout == CheckpointLayout::kModelOpt;
  if (any || group < 0) return;
  for (const std::int64_t width : {model.experts_hidden(), model.intermediate}) {
    FUSEDMOE_CHECK_SUPPORTED(
        width % group == 0, kShape, "scheme", name(model.scheme),
        core::format("one whose groups divide the rows of {}: {} is no multiple of {}, and other "
                     "readers of the layout {} refuse it",
                     width, width, group, name(model.layout)));
  }
}

void check_copied(const checkpoint::OpenedCheckpoint& source,
                  const std::map<std::string, Tensor>& copied) {
  if (!source.config.quantization) return;
  checkpoint::ModuleRules::Lookup formats(source.config.quantization->formats);
  for (const auto& [name, tensor] : copied) {
    if (checkpoint::is_float(tensor.dtype())) continue;
    const checkpoint::ModuleFormat* format = formats.find(name.substr(0, name.rfind('.'))).format;
    if (!format || (!format->scheme && !format->refusal)) continue;
    throw Error::unsupported(
        Reason::kQuantScheme, source.label,
        core::format("{}: {} says that other layers than the routed experts are quantized already, "
                     "such as that of {}: take the checkpoint from before that",
                     source.label, format->source, name));
  }
}

}  // namespace fusedmoe
