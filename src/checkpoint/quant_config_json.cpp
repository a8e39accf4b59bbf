// The names of layouts, and a scheme as a `quantization_config`.
// Sources: config.json of published checkpoints and the quantization configs of Hugging Face
// transformers and vLLM.
#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/quant_config.h"
#include "checkpoint/quant_parsers.h"
#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe {
namespace {

// ---- compressed-tensors

nlohmann::json args_json(const QuantKey& key, bool weights) {
  const bool integer =
      key.value == DType::kI4 || key.value == DType::kU8 || key.value == DType::kI8;
  const bool four = key.value == DType::kI4 || key.value == DType::kE2M1;
  nlohmann::json args{{"num_bits", four ? 4 : 8},
                      {"type", integer ? "int" : "float"},
                      {"symmetric", key.symmetric},
                      {"dynamic", key.dynamic},
                      {"group_size", nullptr},
                      {"observer", weights || !key.dynamic ? nlohmann::json("minmax") : nullptr}};
  const GroupShape group = key.group;
  if (group == GroupShape{-1, -1}) {
    args["strategy"] = "tensor";
  } else if (group == GroupShape{1, -1}) {
    args["strategy"] = weights ? "channel" : "token";
  } else if (group.rows > 1) {
    args["strategy"] = "block";
    args["block_structure"] = {group.rows, group.cols};
  } else {
    const bool nvfp4 = key.value == DType::kE2M1 && key.scale == DType::kE4M3;
    args["strategy"] = nvfp4 ? "tensor_group" : "group";
    args["group_size"] = group.cols;
    if (nvfp4 && key.dynamic) args["dynamic"] = "local";
  }
  if (key.scale == DType::kE8M0) args["scale_dtype"] = checkpoint::kE8M0Scales;
  return args;
}

const char* format_of(const QuantKey& key) {
  switch (key.value) {
    case DType::kE2M1:
      return key.scale == DType::kE8M0 ? "mxfp4-pack-quantized" : "nvfp4-pack-quantized";
    case DType::kE4M3:
      return key.scale == DType::kE8M0 ? "mxfp8-quantized" : "float-quantized";
    case DType::kI8:
      return "int-quantized";
    case DType::kI4:
      return key.scale == DType::kE4M3 ? "int-quantized" : "pack-quantized";
    default:
      return "pack-quantized";
  }
}

/// `config_groups` and `format` for a quantized scheme, in the words of its QuantizationArgs.
void write_compressed_tensors(const QuantScheme& scheme, nlohmann::json& config) {
  nlohmann::json group{{"targets", {"Linear"}}, {"output_activations", nullptr}};
  group["weights"] = args_json(scheme.weights, true);
  if (scheme.weights.value == DType::kI4) group["weights"].erase("scale_dtype");
  group["input_activations"] =
      scheme.activations ? args_json(*scheme.activations, false) : nlohmann::json(nullptr);
  config["config_groups"] = {{"group_0", std::move(group)}};
  config["format"] = format_of(scheme.weights);
  config["quantization_status"] = "compressed";
  config["kv_cache_scheme"] = nullptr;
}

// ----

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
  for (const NamedScheme& row : modelopt_algorithms()) {
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
