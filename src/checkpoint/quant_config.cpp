// Sources: config.json of published checkpoints and the quantization configs of Hugging Face
// transformers and vLLM.
#include "checkpoint/quant_config.h"

#include <array>
#include <cctype>
#include <nlohmann/json.hpp>

#include "checkpoint/compressed_tensors.h"
#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe {
namespace {

constexpr std::array kLayouts{
    std::pair{CheckpointLayout::kPlain, "plain"},
    std::pair{CheckpointLayout::kGptOss, "gpt-oss"},
    std::pair{CheckpointLayout::kFp8, "fp8"},
    std::pair{CheckpointLayout::kCompressedTensors, "compressed-tensors"},
    std::pair{CheckpointLayout::kModelOpt, "modelopt"},
    std::pair{CheckpointLayout::kGptq, "gptq"},
    std::pair{CheckpointLayout::kGptqV2, "gptq_v2"},
    std::pair{CheckpointLayout::kAwq, "awq"},
};

}  // namespace

std::string_view name(CheckpointLayout layout) {
  for (const auto& [value, text] : kLayouts) {
    if (value == layout) return text;
  }
  return "unknown";
}

CheckpointLayout parse_checkpoint_layout(std::string_view text) {
  if (text == "deepseek") return CheckpointLayout::kFp8;
  std::string names;
  for (const auto& [value, layout_name] : kLayouts) {
    if (text == layout_name) return value;
    names += names.empty() ? "" : ", ";
    names += layout_name;
  }
  throw Error::unknown_name("layout", files::quote(text), names);
}

}  // namespace fusedmoe

namespace fusedmoe::checkpoint {
namespace {

using Layout = CheckpointLayout;

constexpr std::int64_t kMaxGroup = 1 << 16;

StoredQuantization parse_fp8(const ConfigKeys& config) {
  const std::string activations = config.string("activation_scheme", "dynamic");
  FUSEDMOE_CHECK_SUPPORTED(activations == "dynamic" || activations == "static", kQuantScheme,
                           config.label("activation_scheme"), files::quote(activations),
                           "dynamic or static");
  const nlohmann::json* block = config.find("weight_block_size");
  if (!block) {
    return {Layout::kFp8, {keys::e4m3_tensor(), keys::e4m3_tensor(activations == "dynamic")}};
  }
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
  return {Layout::kFp8, {keys::e4m3_block(), keys::e4m3_group(format == "ue8m0")}};
}

struct ModelOptAlgorithm {
  const char* name;
  QuantScheme scheme;
};

std::array<ModelOptAlgorithm, 5> modelopt_algorithms() {
  return {{{"FP8", {keys::e4m3_tensor(), keys::e4m3_tensor(false)}},
           {"FP8_PB_WO", {keys::e4m3_block(), std::nullopt}},
           {"FP8_PER_CHANNEL_PER_TOKEN", {keys::e4m3_row(), keys::e4m3_row(true)}},
           {"NVFP4", {keys::nvfp4(), keys::nvfp4(true)}},
           {"MXFP8", {keys::mxfp8(), keys::mxfp8(true)}}}};
}

StoredQuantization parse_modelopt(const ConfigKeys& config) {
  // hf_quant_config.json nests the same keys in `quantization`.
  const ConfigKeys keys = config.object("quantization").value_or(config);
  const std::string algorithm = keys.string("quant_algo", "");
  // ModelOpt writes some names in lower case, as "fp8_pb_wo".
  std::string upper = algorithm;
  for (char& c : upper) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  std::string known;
  for (const ModelOptAlgorithm& row : modelopt_algorithms()) {
    if (upper == row.name) return {Layout::kModelOpt, row.scheme};
    known += known.empty() ? "" : ", ";
    known += row.name;
  }
  throw Error::unsupported(Reason::kQuantScheme, keys.label("quant_algo"), files::quote(algorithm),
                           "one of " + known);
}

StoredQuantization parse_gptq(const ConfigKeys& config) {
  const std::int64_t bits = config.integer("bits", 1, 16);
  FUSEDMOE_CHECK_SUPPORTED(bits == 4 || bits == 8, kQuantScheme, config.label("bits"),
                           core::to_string(bits), "4 or 8");
  const std::int64_t group = config.integer("group_size", -1, kMaxGroup, -1);
  FUSEDMOE_CHECK_FILE(group != 0, config.label("group_size"), "0",
                      "positive, or -1 for a whole row");
  FUSEDMOE_CHECK_SUPPORTED(!config.boolean("desc_act", false), kQuantScheme,
                           config.label("desc_act"), "true",
                           "false: groups of consecutive columns");
  const bool symmetric = config.boolean("sym", true);
  // GPTQModel writes both keys.
  const char* format_key = config.find("checkpoint_format") ? "checkpoint_format" : "format";
  const std::string format = config.string(format_key, "gptq");
  FUSEDMOE_CHECK_SUPPORTED(format == "gptq" || format == "gptq_v2", kQuantScheme,
                           config.label(format_key), files::quote(format), "gptq or gptq_v2");
  const std::string other = config.string("format", format);
  FUSEDMOE_CHECK_FILE(other == format, config.label("format"), files::quote(other),
                      core::format("{}, as checkpoint_format", format));
  const QuantKey key = bits == 4 ? keys::int4(group, symmetric) : keys::int8(group, symmetric);
  return {format == "gptq" ? Layout::kGptq : Layout::kGptqV2, {key, std::nullopt}};
}

StoredQuantization parse_awq(const ConfigKeys& config) {
  // AutoAWQ's own file has the short names.
  const std::int64_t bits = config.integer(config.find("w_bit") ? "w_bit" : "bits", 1, 16);
  const char* group_key = config.find("q_group_size") ? "q_group_size" : "group_size";
  const std::int64_t group = config.integer(group_key, -1, kMaxGroup);
  FUSEDMOE_CHECK_SUPPORTED(bits == 4, kQuantScheme, config.label("bits"), core::to_string(bits),
                           "4");
  FUSEDMOE_CHECK_FILE(group != 0, config.label(group_key), "0", "positive, or -1 for a whole row");
  const std::string version = config.string("version", "gemm");
  FUSEDMOE_CHECK_SUPPORTED(version == "gemm" || version == "GEMM", kQuantScheme,
                           config.label("version"), files::quote(version), "gemm");
  return {Layout::kAwq, {keys::int4(group, !config.boolean("zero_point", true)), std::nullopt}};
}

// ------------------------------------------------------------------------------------------------

using Json = nlohmann::json;

std::optional<Json> fp8_json(const QuantScheme& scheme, std::span<const std::string> modules) {
  Json config{{"quant_method", "fp8"},
              {"activation_scheme", "dynamic"},
              {"weight_block_size", nullptr},
              {"modules_to_not_convert", modules}};
  const QuantKey& weights = scheme.weights;
  const std::optional<QuantKey>& activations = scheme.activations;
  if (weights == keys::e4m3_tensor() && activations == keys::e4m3_tensor(true)) return config;
  if (weights == keys::e4m3_tensor() && activations == keys::e4m3_tensor(false)) {
    config["activation_scheme"] = "static";
    return config;
  }
  if (weights != keys::e4m3_block()) return std::nullopt;
  config["fmt"] = "e4m3";
  config["weight_block_size"] = {128, 128};
  if (activations == keys::e4m3_group()) return config;
  config["scale_fmt"] = "ue8m0";
  return activations == keys::e4m3_group(true) ? std::optional(config) : std::nullopt;
}

std::optional<Json> modelopt_json(const QuantScheme& scheme, std::span<const std::string> modules) {
  for (const ModelOptAlgorithm& row : modelopt_algorithms()) {
    if (row.scheme != scheme) continue;
    return Json{{"quant_method", "modelopt"},
                {"quant_algo", row.name},
                {"kv_cache_quant_algo", nullptr},
                {"ignore", modules}};
  }
  return std::nullopt;
}

/// A module's name as a regular expression that matches only it.
std::string exact_pattern(const std::string& module) {
  std::string pattern = "-:^";
  for (const char c : module) {
    if (c == '.') pattern += '\\';
    pattern += c;
  }
  return pattern + '$';
}

std::optional<Json> gptq_json(const StoredQuantization& stored,
                              std::span<const std::string> modules) {
  const QuantKey& key = stored.scheme.weights;
  const std::int64_t group = key.group.cols;
  if (stored.scheme.activations ||
      (key != keys::int4(group, key.symmetric) && key != keys::int8(group, key.symmetric))) {
    return std::nullopt;
  }
  Json plain = Json::object();
  for (const std::string& module : modules) plain[exact_pattern(module)] = Json::object();
  return Json{{"quant_method", "gptq"}, {"bits", key.value == DType::kI4 ? 4 : 8},
              {"group_size", group},    {"desc_act", false},
              {"sym", key.symmetric},   {"checkpoint_format", name(stored.layout)},
              {"dynamic", plain}};
}

std::optional<Json> awq_json(const QuantScheme& scheme, std::span<const std::string> modules) {
  const std::int64_t group = scheme.weights.group.cols;
  if (scheme.activations || scheme.weights != keys::int4(group, false)) return std::nullopt;
  return Json{{"quant_method", "awq"}, {"bits", 4},         {"group_size", group},
              {"zero_point", true},    {"version", "gemm"}, {"modules_to_not_convert", modules}};
}

}  // namespace

StoredQuantization parse_quantization(const ConfigKeys& config, const ExpertModules& experts) {
  const std::string method = config.string("quant_method", "");
  if (method == "mxfp4") return {Layout::kGptOss, schemes::mxfp4_w4a16()};
  if (method == "fp8") return parse_fp8(config);
  if (method == "compressed-tensors") {
    const auto scheme = parse_compressed_tensors(config, experts);
    if (!scheme) return {};
    return {Layout::kCompressedTensors, *scheme};
  }
  if (method == "gptq") return parse_gptq(config);
  if (method == "awq") return parse_awq(config);
  if (method == "auto-round" || method == "intel/auto-round") {
    // AutoRound packs its weights as AutoGPTQ or AutoAWQ do.
    const std::string packing = config.string("packing_format", "");
    if (packing.ends_with("auto_gptq")) return parse_gptq(config);
    if (packing.ends_with("auto_awq")) return parse_awq(config);
    throw Error::unsupported(Reason::kQuantScheme, config.label("packing_format"),
                             files::quote(packing), "auto_round:auto_gptq or auto_round:auto_awq");
  }
  const bool nested = config.find("quantization") || config.find("quant_algo");
  if (method.starts_with("modelopt") || (method.empty() && nested)) return parse_modelopt(config);
  throw Error::unsupported(Reason::kQuantScheme, config.label("quant_method"), files::quote(method),
                           "mxfp4, fp8, compressed-tensors, modelopt, gptq, awq or auto-round");
}

std::optional<nlohmann::json> quantization_config(const StoredQuantization& quantization,
                                                  std::span<const std::string> plain_modules) {
  const QuantScheme& scheme = quantization.scheme;
  // GGUF alone holds llama.cpp's blocks, and down matrices in a format of their own.
  if (scheme.down || scheme.weights.global_scale == DType::kF16 ||
      scheme.weights.value == DType::kIq4) {
    return std::nullopt;
  }
  // No layout has int16 activations.
  if (scheme.activations && scheme.activations->value == DType::kI16) return std::nullopt;
  switch (quantization.layout) {
    case Layout::kPlain:
      return std::nullopt;
    case Layout::kGptOss:
      if (scheme != schemes::mxfp4_w4a16()) return std::nullopt;
      return Json{{"quant_method", "mxfp4"}, {"modules_to_not_convert", plain_modules}};
    case Layout::kFp8:
      return fp8_json(scheme, plain_modules);
    case Layout::kModelOpt:
      return modelopt_json(scheme, plain_modules);
    case Layout::kGptq:
    case Layout::kGptqV2:
      return gptq_json(quantization, plain_modules);
    case Layout::kAwq:
      return awq_json(scheme, plain_modules);
    case Layout::kCompressedTensors: {
      if (!scheme.weights.quantized()) return std::nullopt;
      Json config{{"quant_method", "compressed-tensors"}, {"ignore", plain_modules}};
      write_compressed_tensors(scheme, config);
      return config;
    }
  }
  return std::nullopt;
}

CheckpointLayout usual_layout(const Family& family, const QuantScheme& scheme) {
  const auto holds = [&](Layout layout) {
    return quantization_config({layout, scheme}, {}).has_value();
  };
  if (family.name() == "gpt_oss" && holds(Layout::kGptOss)) return Layout::kGptOss;
  if (holds(Layout::kFp8)) return Layout::kFp8;
  if (scheme.weights == keys::nvfp4() && holds(Layout::kModelOpt)) return Layout::kModelOpt;
  return Layout::kCompressedTensors;
}

}  // namespace fusedmoe::checkpoint
