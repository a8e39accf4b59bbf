// config.json of well-known models, cut down to what concerns their MoE layers: families/
// presets.json. deepseek-v3 is published in FP8; its preset leaves the quantization out and stands
// for the same model in bf16.
#include <nlohmann/json.hpp>

#include "checkpoint/embedded.h"
#include "core/check.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe {
namespace {

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
