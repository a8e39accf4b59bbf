// Source: the arguments of compressed-tensors' QuantizationArgs and the checkpoints of
// llm-compressor. Activations in groups of int8 and power-of-two scales of E4M3 groups are said in
// the same words, though no published model has them.
#include "checkpoint/compressed_tensors.h"

#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/quant_targets.h"
#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr std::int64_t kMaxGroup = 1 << 16;
constexpr const char* kE8M0 = "torch.uint8";  // how E8M0 scales are stored

/// Arguments of one operand.
struct Args {
  std::int64_t num_bits = 0;
  std::string type, strategy;
  std::int64_t group = -1;
  bool symmetric = true;
  bool dynamic = false;
  bool e8m0_scale = false;
};

bool square_block(const ConfigKeys& keys, std::int64_t size) {
  const nlohmann::json* block = keys.find("block_structure");
  return block && *block == nlohmann::json::array({size, size});
}

Args read_args(const ConfigKeys& keys) {
  Args args;
  args.num_bits = keys.integer("num_bits", 1, 64);
  args.type = keys.string("type", "int");
  args.group = keys.integer("group_size", -1, kMaxGroup, -1);
  args.strategy = keys.string("strategy", args.group > 0 ? "group" : "tensor");
  args.symmetric = keys.boolean("symmetric", true);
  args.e8m0_scale = keys.string("scale_dtype", "") == kE8M0;
  // true, false, or "local": block scales dynamic, the global scale not (NVFP4).
  const nlohmann::json* dynamic = keys.find("dynamic");
  args.dynamic = dynamic && *dynamic == "local" ? true : keys.boolean("dynamic", false);
  if (args.strategy == "block") {
    constexpr std::int64_t kBlock = 128;
    FUSEDMOE_CHECK_SUPPORTED(
        square_block(keys, kBlock), kQuantScheme, keys.label("block_structure"),
        keys.find("block_structure") ? "another block" : "absent", "[128, 128]");
  }
  FUSEDMOE_CHECK_SUPPORTED(
      keys.string("actorder", "").empty() || keys.string("actorder", "") == "static", kQuantScheme,
      keys.label("actorder"), files::quote(keys.string("actorder", "")),
      "absent or \"static\": groups of consecutive columns");
  return args;
}

std::string text(const Args& args) {
  return core::format("{} bits, {}, {}, group_size {}, {}, {}", args.num_bits, args.type,
                      args.strategy, args.group, args.symmetric ? "symmetric" : "asymmetric",
                      args.dynamic ? "dynamic" : "static");
}

std::optional<QuantKey> float_weights(const Args& args) {
  if (!args.symmetric || args.dynamic) return std::nullopt;
  const bool group = args.strategy == "group" && args.group == 32;
  if (args.num_bits == 8) {
    if (args.strategy == "tensor") return keys::e4m3_tensor();
    if (args.strategy == "channel") return keys::e4m3_row();
    if (args.strategy == "block") return keys::e4m3_block();
    if (group) return keys::mxfp8();
  }
  if (args.num_bits == 4) {
    if (args.strategy == "tensor_group" && args.group == 16) return keys::nvfp4();
    if (group) return keys::mxfp4();
  }
  return std::nullopt;
}

std::optional<QuantKey> int_weights(const Args& args, bool packed) {
  if (args.dynamic || (args.strategy != "group" && args.strategy != "channel")) return std::nullopt;
  const std::int64_t group = args.strategy == "group" ? args.group : -1;
  if (group == 0 || (args.strategy == "group" && group < 0)) return std::nullopt;
  // Four bits in bytes: only beside quantized activations, see below.
  if (args.num_bits == 4 && (packed || group == 128)) return keys::int4(group, args.symmetric);
  if (args.num_bits == 8 && packed) return keys::int8(group, args.symmetric);
  if (args.num_bits == 8 && group < 0 && args.symmetric) return keys::int8_row();
  return std::nullopt;
}

std::optional<QuantKey> activations(const Args& args) {
  if (!args.symmetric) return std::nullopt;
  const bool group = args.strategy == "group" && args.dynamic && args.group > 0;
  if (args.type == "float" && args.num_bits == 8) {
    if (args.strategy == "tensor") return keys::e4m3_tensor(args.dynamic);
    if (args.strategy == "token" && args.dynamic) return keys::e4m3_row(true);
    if (group && args.group == 128) return keys::e4m3_group(args.e8m0_scale);
    if (group && args.group == 32) return keys::mxfp8(true);
  }
  if (args.type == "float" && args.num_bits == 4) {
    if (args.strategy == "tensor_group" && args.group == 16) return keys::nvfp4(true);
    // compressed-tensors rounds the block's exponent to even, whatever the weights' own scales.
    if (group && args.group == 32) return keys::mxfp4(true, MxScaleRule::kEven);
  }
  if (args.type == "int" && args.num_bits == 8) {
    // compressed-tensors divides by half of the 255 steps between -128 and 127.
    std::optional<QuantKey> key;
    if (args.strategy == "token" && args.dynamic) key = keys::int8_row(true);
    if (group) key = keys::int8_group(args.group);
    if (key) key->full_range = true;
    return key;
  }
  return std::nullopt;
}

// ------------------------------------------------------------------------------------------------

/// The inverse of the functions above.
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
  if (key.scale == DType::kE8M0) args["scale_dtype"] = kE8M0;
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

}  // namespace

std::optional<QuantScheme> parse_compressed_tensors(const ConfigKeys& config,
                                                    const ExpertModules& experts) {
  const nlohmann::json* groups = config.find("config_groups");
  FUSEDMOE_CHECK_FILE(groups && groups->is_object(), config.label("config_groups"),
                      groups ? ConfigKeys::text(*groups) : "absent", "an object");
  const std::string label = config.label("config_groups");
  const auto name = group_of_modules(*groups, config.find("ignore"), experts, label);
  if (!name) return std::nullopt;
  const ConfigKeys group(groups->at(*name), label + "." + files::quote(*name));
  const std::optional<ConfigKeys> weights = group.object("weights");
  FUSEDMOE_CHECK_FILE(weights, group.label("weights"), "absent", "an object");
  const std::optional<ConfigKeys> inputs = group.object("input_activations");

  const Args args = read_args(*weights);
  const std::string format = group.string("format", config.string("format", ""));
  // Published int8 models with quantized activations keep plain bytes, all others words.
  const bool packed = format == "pack-quantized" || (format.empty() && !inputs);
  std::optional<QuantKey> key;
  if (args.type == "float") key = float_weights(args);
  if (args.type == "int") key = int_weights(args, packed);
  FUSEDMOE_CHECK_SUPPORTED(key, kQuantScheme, group.label("weights"), text(args),
                           "a format of weights that this library has");
  QuantScheme scheme{*key, std::nullopt};
  if (!inputs) {
    FUSEDMOE_CHECK_SUPPORTED(packed || scheme.weights.value != DType::kI4, kQuantScheme,
                             group.label("format"), files::quote(format), "pack-quantized");
    return scheme;
  }
  const Args input = read_args(*inputs);
  scheme.activations = activations(input);
  FUSEDMOE_CHECK_SUPPORTED(scheme.activations, kQuantScheme, group.label("input_activations"),
                           text(input), "a format of activations that this library has");
  // INT4 beside E4M3 activations has E4M3 group scales.
  if (scheme.weights == keys::int4(128) && scheme.activations == keys::e4m3_row(true)) {
    scheme.weights = keys::int4_e4m3();
  }
  FUSEDMOE_CHECK_SUPPORTED(
      packed || scheme.weights.value != DType::kI4 || scheme.weights == keys::int4_e4m3(),
      kQuantScheme, group.label("format"), files::quote(format),
      "pack-quantized, unless the activations are fp8 per token");
  return scheme;
}

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

}  // namespace fusedmoe::checkpoint
