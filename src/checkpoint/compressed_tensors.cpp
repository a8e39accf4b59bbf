// Source: the arguments of compressed-tensors' QuantizationArgs and the checkpoints of
// llm-compressor. Activations in groups of int8 and power-of-two scales of E4M3 groups are said in
// the same words, though no published model has them.
#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/quant_parsers.h"
#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

/// Arguments of one operand.
struct Args {
  std::int64_t num_bits = 0;
  std::string type, strategy;
  std::int64_t group = -1;
  bool symmetric = true;
  bool dynamic = false;
  bool e8m0_scale = false;
};

constexpr auto kOfArgs = std::to_array<std::string_view>(
    {"num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic",
     "actorder", "scale_dtype",
     // How the scales were found; the dtype of zero points is that of their tensor.
     "observer", "observer_kwargs", "zp_dtype"});

bool square_block(const ConfigKeys& keys, std::int64_t size) {
  const nlohmann::json* block = keys.find("block_structure");
  return block && (*block == nlohmann::json::array({size, size}) ||
                   *block == core::format("{}x{}", size, size));
}

/// "weight" and its alias "static" calibrate in the order of the columns and leave them in place;
/// "group" and "dynamic", also written true, permute them.
void check_order(const ConfigKeys& keys) {
  const nlohmann::json* order = keys.find("actorder");
  if (!order) return;
  const bool in_place = *order == false || *order == "weight" || *order == "static";
  FUSEDMOE_CHECK_SUPPORTED(in_place, kQuantScheme, keys.label("actorder"), ConfigKeys::text(*order),
                           "null, \"weight\" or \"static\": groups of consecutive columns");
}

Args read_args(const ConfigKeys& keys) {
  keys.check_known("compressed-tensors' arguments", {kOfArgs});
  Args args;
  args.num_bits = keys.integer("num_bits", 1, 64);
  args.type = keys.string("type", "int");
  args.group = keys.integer("group_size", -1, kMaxGroup, -1);
  const char* strategy = args.group > 0 ? "group" : keys.find("group_size") ? "channel" : "tensor";
  args.strategy = keys.string("strategy", strategy);
  args.symmetric = keys.boolean("symmetric", true);
  args.e8m0_scale = keys.string("scale_dtype", "") == kE8M0Scales;
  // true, false, or "local": block scales dynamic, the global scale not (NVFP4).
  const nlohmann::json* dynamic = keys.find("dynamic");
  args.dynamic = dynamic && *dynamic == "local" ? true : keys.boolean("dynamic", false);
  if (args.strategy == "block") {
    constexpr std::int64_t kBlock = 128;
    FUSEDMOE_CHECK_SUPPORTED(
        square_block(keys, kBlock), kQuantScheme, keys.label("block_structure"),
        keys.find("block_structure") ? "another block" : "absent", "[128, 128]");
  }
  check_order(keys);
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

constexpr auto kCompressedTensorsKeys = std::to_array<std::string_view>(
    {"quant_method", "config_groups", "format", "ignore", "transform_config", "sparsity_config",
     // Of attention, for information, and who wrote the file.
     "kv_cache_scheme", "quantization_status", "global_compression_ratio", "run_compressed",
     "version", "producer", "provider", "autoround_version"});

constexpr auto kCompressedTensorsGroup = std::to_array<std::string_view>(
    {"targets", "weights", "input_activations", "output_activations", "format"});

constexpr auto kFormats = std::to_array<std::string_view>(
    {"", "dense", "mixed-precision", "naive-quantized", "int-quantized", "float-quantized",
     "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"});

/// The scheme of one group; nothing: it quantizes no weights.
std::optional<QuantScheme> scheme_of_group(const ConfigKeys& config, const ConfigKeys& group) {
  group.check_known("a group", {kCompressedTensorsGroup});
  const std::optional<ConfigKeys> weights = group.object("weights");
  const std::optional<ConfigKeys> inputs = group.object("input_activations");
  for (const char* key : {"input_activations", "output_activations"}) {
    const nlohmann::json* value = group.find(key);
    const bool fits = !value || (weights && key == std::string_view("input_activations"));
    FUSEDMOE_CHECK_SUPPORTED(fits, kQuantScheme, group.label(key), ConfigKeys::text(*value),
                             "null: only weights and their inputs are quantized");
  }
  if (!weights) return std::nullopt;
  const Args args = read_args(*weights);
  const bool own_format = group.find("format");
  const std::string format = (own_format ? group : config).string("format", "");
  const std::string label = (own_format ? group : config).label("format");
  FUSEDMOE_CHECK_SUPPORTED(std::find(kFormats.begin(), kFormats.end(), format) != kFormats.end(),
                           kQuantScheme, label, files::quote(format),
                           "one without sparsity: " + core::join(kFormats, ", ").substr(2));
  // Published int8 models with quantized activations keep plain bytes, all others words.
  const bool packed = format == "pack-quantized" || (format.empty() && !inputs);
  std::optional<QuantKey> key;
  if (args.type == "float") key = float_weights(args);
  if (args.type == "int") key = int_weights(args, packed);
  FUSEDMOE_CHECK_SUPPORTED(key, kQuantScheme, group.label("weights"), text(args),
                           "a format of weights that this library has");
  QuantScheme scheme{*key, std::nullopt};
  if (!inputs) {
    FUSEDMOE_CHECK_SUPPORTED(packed || scheme.weights.value != DType::kI4, kQuantScheme, label,
                             files::quote(format), "pack-quantized");
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
      kQuantScheme, label, files::quote(format),
      "pack-quantized, unless the activations are fp8 per token");
  return scheme;
}

// ------------------------------------------------------------------------------------------------

constexpr std::string_view kPattern = "re:";

/// Of a target: the class of a linear layer, or of experts in one module.
bool is_class(std::string_view target) {
  return target == "Linear" || target == "FusedMoE";
}

using Targets = std::vector<std::pair<std::string, std::size_t>>;

/// Names, then patterns, then classes, as compressed-tensors matches them. `sorted`: it takes
/// patterns in the order of their texts, where other readers take the groups in turn.
void add_targets(const Targets& targets, const std::string& label, bool sorted,
                 ModuleRules& rules) {
  for (const auto& [target, format] : targets) {
    if (target.starts_with(kPattern) || is_class(target)) continue;
    rules.add_name(ModuleRules::Names::kExact, target, format);
  }
  for (const auto& [target, format] : targets) {
    if (!target.starts_with(kPattern)) continue;
    rules.add_pattern({ModulePattern::Kind::kMatch, target.substr(kPattern.size()), label}, format,
                      sorted ? target : std::string());
  }
  for (const auto& [target, format] : targets) {
    if (is_class(target)) rules.add_every(format, target == "Linear");
  }
}

void add_ignored(const ConfigKeys& config, ModuleRules& rules) {
  Targets targets;
  const std::string label = config.label("ignore");
  std::optional<std::size_t> by_name;
  for (const std::string& target : config.strings("ignore")) {
    // A list of modules; a class there would leave nothing quantized.
    if (is_class(target)) continue;
    const bool pattern = target.starts_with(kPattern);
    if (!pattern && !by_name) by_name = rules.add_format({{}, label, {}});
    targets.emplace_back(
        target,
        pattern ? rules.add_format({{}, core::format("{} ({})", label, files::quote(target)), {}})
                : *by_name);
  }
  add_targets(targets, label, false, rules);
}

void add_groups(const ConfigKeys& config, const KeyOrder& order, ModuleRules& rules) {
  const std::optional<ConfigKeys> groups = config.object("config_groups");
  FUSEDMOE_CHECK_FILE(groups && !groups->node().empty(), config.label("config_groups"),
                      groups ? "empty" : "absent", "an object of at least one group");
  Targets targets;
  std::map<std::string, std::pair<std::string, std::optional<QuantScheme>>> seen;
  for (const std::string& name : keys_in_order(config, "config_groups", order)) {
    const nlohmann::json& value = groups->node().at(name);
    const std::string label = core::format("{}.{}", groups->path(), files::quote(name));
    FUSEDMOE_CHECK_FILE(value.is_object(), label, ConfigKeys::text(value), "an object");
    const ConfigKeys group(value, label);
    const ModuleFormat format = read_format(label, [&] { return scheme_of_group(config, group); });
    const std::size_t index = rules.add_format(format);
    const std::vector<std::string> listed =
        group.find("targets") ? group.strings("targets") : std::vector<std::string>{"Linear"};
    for (const std::string& target : listed) {
      const auto [other, is_new] = seen.try_emplace(target, label, format.scheme);
      if (!is_new && other->second.second != format.scheme) {
        throw Error::unsupported(
            Reason::kQuantScheme, label + ".targets",
            core::format("{} and {} both have the target {}, but differ in the format", label,
                         other->second.first, files::quote(target)));
      }
      targets.emplace_back(target, index);
    }
  }
  add_targets(targets, groups->path(), true, rules);
}

// ------------------------------------------------------------------------------------------------

constexpr auto kOfTransforms = std::to_array<std::string_view>({"config_groups"});

/// What `transform_config` does to inputs and outputs at run time. What it did to the weights is in
/// the file.
void add_transforms(const ConfigKeys& config, std::vector<ModuleRules>& transforms) {
  const std::optional<ConfigKeys> transform = config.object("transform_config");
  if (!transform) return;
  transform->check_known("transform_config", {kOfTransforms});
  const std::optional<ConfigKeys> groups = transform->object("config_groups");
  if (!groups) return;
  for (const auto& [name, value] : groups->node().items()) {
    const std::string label = core::format("{}.{}", groups->path(), files::quote(name));
    FUSEDMOE_CHECK_FILE(value.is_object(), label, ConfigKeys::text(value), "an object");
    const nlohmann::json* applied = ConfigKeys(value, label).find("apply");
    FUSEDMOE_CHECK_FILE(applied && applied->is_array(), label + ".apply",
                        applied ? ConfigKeys::text(*applied) : "absent", "a list");
    for (const nlohmann::json& element : *applied) {
      FUSEDMOE_CHECK_FILE(element.is_object(), label + ".apply", ConfigKeys::text(element),
                          "a list of objects");
      const ConfigKeys apply(element, label + ".apply");
      const std::string location = apply.string("location", "");
      if (location == "weight_input" || location == "weight_output") continue;
      ModuleRules rules;
      add_ignored(apply, rules);
      const std::string type = ConfigKeys(value, label).string("type", "transform");
      const std::size_t refused = rules.add_format(
          {{},
           label,
           Error::unsupported(
               Reason::kQuantScheme, label,
               core::format("{} applies a {} to the {} of the experts' layers at run time, which "
                            "nothing here computes: only transforms that were folded into the "
                            "weights are served",
                            label, type, location.empty() ? "inputs" : location))});
      Targets targets;
      for (std::string& target : apply.strings("targets")) {
        targets.emplace_back(std::move(target), refused);
      }
      add_targets(targets, apply.label("targets"), false, rules);
      transforms.push_back(std::move(rules));
    }
  }
}

/// Zeros in dense weights are as good as other numbers; compressed ones have other tensors.
void check_sparsity(const ConfigKeys& config) {
  const std::optional<ConfigKeys> sparsity = config.object("sparsity_config");
  if (!sparsity) return;
  const std::string format = sparsity->string("format", "dense");
  FUSEDMOE_CHECK_SUPPORTED(format == "dense", kQuantScheme, sparsity->label("format"),
                           files::quote(format), "dense");
}

}  // namespace

QuantRules parse_compressed_tensors(const ConfigKeys& config, const KeyOrder& order) {
  config.check_known("a compressed-tensors config", {kCompressedTensorsKeys});
  check_sparsity(config);
  QuantRules rules;
  rules.layout = CheckpointLayout::kCompressedTensors;
  add_ignored(config, rules.formats);
  add_groups(config, order, rules.formats);
  add_transforms(config, rules.transforms);
  return rules;
}

}  // namespace fusedmoe::checkpoint
