// Sources: config.json of published checkpoints and the quantization configs of Hugging Face
// transformers and vLLM.
#include "checkpoint/quant_config.h"

#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/quant_parsers.h"
#include "core/check.h"
#include "files/json.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

using Layout = CheckpointLayout;

QuantScheme read_fp8(const ConfigKeys& config) {
  const std::string type = config.string("fmt", "e4m3");
  FUSEDMOE_CHECK_SUPPORTED(type == "e4m3" || type == "float8_e4m3fn", kQuantScheme,
                           config.label("fmt"), files::quote(type), "e4m3");
  const std::string activations = config.string("activation_scheme", "dynamic");
  FUSEDMOE_CHECK_SUPPORTED(activations == "dynamic" || activations == "static", kQuantScheme,
                           config.label("activation_scheme"), files::quote(activations),
                           "dynamic or static");
  const nlohmann::json* block = config.find("weight_block_size");
  if (!block) return {keys::e4m3_tensor(), keys::e4m3_tensor(activations == "dynamic")};
  constexpr std::int64_t kBlock = 128;
  FUSEDMOE_CHECK_SUPPORTED(*block == nlohmann::json::array({kBlock, kBlock}), kQuantScheme,
                           config.label("weight_block_size"),
                           block->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                           "[128, 128]");
  FUSEDMOE_CHECK_SUPPORTED(activations == "dynamic", kQuantScheme,
                           config.label("activation_scheme"), files::quote(activations),
                           "dynamic for weights in blocks");
  const std::string format = config.string("scale_fmt", "float");
  FUSEDMOE_CHECK_SUPPORTED(format == "float" || format == "ue8m0", kQuantScheme,
                           config.label("scale_fmt"), files::quote(format), "ue8m0 or absent");
  return {keys::e4m3_block(), keys::e4m3_group(format == "ue8m0")};
}

/// One format for all modules but those that the lists name.
QuantRules all_but(const ConfigKeys& config, Layout layout, const QuantScheme& scheme,
                   std::string_view expert_dtype) {
  QuantRules rules;
  rules.layout = layout;
  for (const char* list : {"modules_to_not_convert", "ignored_layers"}) {
    add_plain_modules(config, list, ListPatterns::kRegex, rules.formats);
  }
  // Routed experts in MXFP4 among linear layers in FP8. DeepSeek's own kernels also round the
  // inputs of these experts to FP8; here they stay exact.
  if (layout == Layout::kFp8 && !expert_dtype.empty()) {
    const std::string label =
        config.find("expert_dtype") ? config.label("expert_dtype") : "config.expert_dtype";
    FUSEDMOE_CHECK_SUPPORTED(expert_dtype == "fp4" || expert_dtype == "fp8", kQuantScheme, label,
                             files::quote(expert_dtype), "fp8 or fp4");
    rules.formats.add_name(
        ModuleRules::Names::kAnywhere, "experts",
        rules.formats.add_format(
            {expert_dtype == "fp4" ? schemes::mxfp4_w4a16() : scheme, label, {}}));
  }
  rules.formats.add_every(rules.formats.add_format({scheme, config.path(), {}}));
  return rules;
}

constexpr auto kFp8Keys = std::to_array<std::string_view>(
    {"quant_method", "modules_to_not_convert", "ignored_layers", "fmt", "activation_scheme",
     "weight_block_size", "scale_fmt", "expert_dtype",
     // What readers do with the weights in memory, other tensors, and who wrote the file.
     "dequantize", "modules_to_convert", "kv_cache_scheme", "is_checkpoint_fp8_serialized",
     "packed_modules_mapping", "producer", "provider"});

}  // namespace

KeyOrder key_order(std::string_view config_json) {
  constexpr auto kWithin =
      std::to_array<std::string_view>({"quantization_config", "compression_config"});
  constexpr auto kObjects =
      std::to_array<std::string_view>({"config_groups", "dynamic", "extra_config"});
  return files::keys_in_order(config_json, kWithin, kObjects);
}

QuantRules parse_quantization(const ConfigKeys& config, const KeyOrder& order,
                              std::string_view expert_dtype) {
  const std::string method = config.string("quant_method", "");
  if (method == "mxfp4" || method == "fp8") {
    config.check_known(core::format("an {} config", method), {kFp8Keys});
    return method == "fp8" ? all_but(config, Layout::kFp8, read_fp8(config), expert_dtype)
                           : all_but(config, Layout::kGptOss, schemes::mxfp4_w4a16(), {});
  }
  if (method == "compressed-tensors") return parse_compressed_tensors(config, order);
  if (method == "gptq") return parse_gptq(config, order);
  if (method == "awq") return parse_awq(config, order);
  if (method == "auto-round" || method == "auto_round" || method == "intel/auto-round") {
    return parse_auto_round(config, order);
  }
  const bool nested = config.find("quantization") || config.find("quant_algo");
  if (method.starts_with("modelopt") || (method.empty() && nested)) return parse_modelopt(config);
  throw Error::unsupported(Reason::kQuantScheme, config.label("quant_method"),
                           method.empty() ? config.missing("quant_method") : files::quote(method),
                           "mxfp4, fp8, compressed-tensors, modelopt, gptq, awq or auto-round");
}

}  // namespace fusedmoe::checkpoint
