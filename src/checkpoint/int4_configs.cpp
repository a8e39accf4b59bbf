// The configs of GPTQ, AWQ and AutoRound: one format for all modules, and others for some.
// Sources: GPTQModel's QuantizeConfig, AutoAWQ's and AutoRound's files, and how transformers and
// vLLM read them.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "checkpoint/quant_parsers.h"
#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

using Layout = CheckpointLayout;
using Names = ModuleRules::Names;

constexpr auto kOfModel = std::to_array<std::string_view>(
    {"quant_method", "method", "zero_point", "version", "format", "checkpoint_format",
     "packing_format", "pack_dtype", "is_marlin_format", "backend", "dynamic", "extra_config",
     "modules_to_not_convert", "ignore", "modules_in_block_to_quantize", "block_name_to_quantize",
     "to_quant_block_names", "quant_block_list"});

constexpr auto kInt4Module = std::to_array<std::string_view>(
    {"bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "static_groups", "data_type",
     "adapter", "act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic"});

// How the weights were found, how readers hold them in memory, and who wrote the file.
constexpr auto kHarmless = std::to_array<std::string_view>({"damp_percent",
                                                            "damp_auto_increment",
                                                            "true_sequential",
                                                            "mse",
                                                            "gptaq",
                                                            "gptaq_alpha",
                                                            "foem",
                                                            "v2",
                                                            "v2_alpha",
                                                            "act_group_aware",
                                                            "hyb_act",
                                                            "fallback",
                                                            "failsafe",
                                                            "hessian",
                                                            "meta",
                                                            "lm_head",
                                                            "dataset",
                                                            "tokenizer",
                                                            "batch_size",
                                                            "pad_token_id",
                                                            "max_input_length",
                                                            "model_seqlen",
                                                            "module_name_preceding_first_block",
                                                            "cache_block_outputs",
                                                            "use_cuda_fp16",
                                                            "use_exllama",
                                                            "disable_exllama",
                                                            "exllama_config",
                                                            "model_name_or_path",
                                                            "model_file_base_name",
                                                            "pack_impl",
                                                            "offload_to_disk",
                                                            "offload_to_disk_path",
                                                            "device",
                                                            "quantizer",
                                                            "vram_strategy",
                                                            "gc_mode",
                                                            "moe",
                                                            "auto_forward_data_parallel",
                                                            "wait_for_submodule_finalizers",
                                                            "compute_device_filter",
                                                            "do_fuse",
                                                            "modules_to_fuse",
                                                            "fuse_max_seq_len",
                                                            "autoround_version",
                                                            "iters",
                                                            "lr",
                                                            "minmax_lr",
                                                            "nsamples",
                                                            "seqlen",
                                                            "enable_quanted_input",
                                                            "enable_minmax_tuning",
                                                            "enable_norm_bias_tuning",
                                                            "low_gpu_mem_usage",
                                                            "low_cpu_mem_usage",
                                                            "gradient_accumulate_steps",
                                                            "amp",
                                                            "scale_dtype",
                                                            "sampler",
                                                            "lr_scheduler",
                                                            "not_use_best_mse",
                                                            "dynamic_max_gap",
                                                            "seed",
                                                            "super_bits",
                                                            "super_group_size",
                                                            "model_free",
                                                            "supported_types",
                                                            "in_blocks",
                                                            "fixed_by_user",
                                                            "producer",
                                                            "provider",
                                                            "kv_cache_scheme"});

/// The numbers of one module.
struct Int4Settings {
  std::int64_t bits = 4, group = -1;
  bool symmetric = true, ordered = false, static_groups = false;
  std::string data_type = "int";
};

/// Those of `config`, and where it says nothing `otherwise`.
Int4Settings read_settings(const ConfigKeys& config, const std::optional<Int4Settings>& otherwise) {
  Int4Settings settings = otherwise.value_or(Int4Settings{});
  std::optional<std::int64_t> bits, group(settings.group);
  if (otherwise) bits = settings.bits;
  settings.bits = config.integer(config.find("w_bit") ? "w_bit" : "bits", 1, 32, bits);
  settings.group = config.integer(config.find("q_group_size") ? "q_group_size" : "group_size", -1,
                                  kMaxGroup, group);
  settings.symmetric = config.boolean("sym", settings.symmetric);
  settings.ordered = config.boolean("desc_act", settings.ordered);
  settings.static_groups = config.boolean("static_groups", settings.static_groups);
  settings.data_type = config.string("data_type", settings.data_type);
  return settings;
}

/// What these keys may hold without a change of the arithmetic.
void check_rest(const ConfigKeys& config) {
  const auto check = [&](const char* key, bool fits, const char* wanted) {
    const nlohmann::json* value = config.find(key);
    FUSEDMOE_CHECK_SUPPORTED(!value || fits, kQuantScheme, config.label(key),
                             ConfigKeys::text(*value), wanted);
  };
  const nlohmann::json* adapter = config.find("adapter");
  check("adapter", adapter && adapter->empty(), "absent: what it adds to the outputs is not read");
  for (const char* key :
       {"act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic"}) {
    const nlohmann::json* bits = config.find("act_bits");
    const bool plain = !bits || (bits->is_number_integer() && bits->get<std::int64_t>() >= 16);
    check(key, plain, "absent, or act_bits of 16 or more: inputs are not quantized");
  }
}

/// 16 bits and more: not quantized.
std::optional<QuantScheme> scheme_of(const ConfigKeys& config, const Int4Settings& settings,
                                     bool awq) {
  const auto [bits, group, symmetric, ordered, static_groups, type] = settings;
  if (bits >= 16) return std::nullopt;
  check_rest(config);
  FUSEDMOE_CHECK_SUPPORTED(type == "int", kQuantScheme, config.label("data_type"),
                           files::quote(type), "int");
  FUSEDMOE_CHECK_SUPPORTED(bits == 4 || (bits == 8 && !awq), kQuantScheme, config.label("bits"),
                           core::to_string(bits), awq ? "4" : "4 or 8");
  FUSEDMOE_CHECK_FILE(group != 0, config.label("group_size"), "0",
                      "positive, or -1 for a whole row");
  // A whole row is one group whatever the order of its columns; static groups keep their columns.
  FUSEDMOE_CHECK_SUPPORTED(!ordered || group < 0 || static_groups, kQuantScheme,
                           config.label("desc_act"), "true",
                           "false: groups of consecutive columns");
  return QuantScheme{bits == 4 ? keys::int4(group, symmetric) : keys::int8(group, symmetric), {}};
}

/// What one entry of a table of modules says.
ModuleFormat format_of_entry(const nlohmann::json& table, const std::string& key,
                             const std::string& label, const Int4Settings& base, bool awq) {
  const std::string source = core::format("{}.{}", label, files::quote(key));
  return read_format(source, [&] {
    const nlohmann::json& value = table.at(key);
    FUSEDMOE_CHECK_FILE(value.is_object(), source, ConfigKeys::text(value), "an object");
    const ConfigKeys own(value, source);
    own.check_known("a module's settings", {kInt4Module, kHarmless});
    return scheme_of(own, read_settings(own, base), awq);
  });
}

/// GPTQModel's `dynamic`: "-:pattern" leaves modules as they are, "+:pattern" or "pattern" changes
/// settings. It sorts the former to the front.
void add_dynamic(const ConfigKeys& config, const KeyOrder& order, const Int4Settings& base,
                 bool awq, ModuleRules& rules) {
  const std::optional<ConfigKeys> dynamic = config.object("dynamic");
  std::vector<std::string> patterns = keys_in_order(config, "dynamic", order);
  std::stable_partition(patterns.begin(), patterns.end(),
                        [](const std::string& text) { return text.starts_with('-'); });
  for (const std::string& text : patterns) {
    const std::string label = config.label("dynamic");
    const bool plain = text.starts_with("-:");
    const std::string pattern = plain || text.starts_with("+:") ? text.substr(2) : text;
    const std::size_t format = rules.add_format(
        plain ? ModuleFormat{{}, core::format("{}.{}", label, files::quote(text)), {}}
              : format_of_entry(dynamic->node(), text, label, base, awq));
    if (const std::string name = exact_name(pattern); !name.empty()) {
      rules.add_name(Names::kExact, name, format);
    } else {
      rules.add_pattern({ModulePattern::Kind::kMatch, pattern, label}, format);
    }
  }
}

/// AutoRound's `extra_config`: names first, then patterns for any part of a name.
void add_extra(const ConfigKeys& config, const KeyOrder& order, const Int4Settings& base, bool awq,
               ModuleRules& rules) {
  const std::optional<ConfigKeys> extra = config.object("extra_config");
  std::vector<std::string> texts = keys_in_order(config, "extra_config", order);
  const auto patterns =
      std::stable_partition(texts.begin(), texts.end(), [](const std::string& text) {
        return text.find_first_of("*+?^$()[]{}|\\") == std::string::npos;
      });
  for (auto text = texts.begin(); text != texts.end(); ++text) {
    const std::string label = config.label("extra_config");
    const std::size_t format =
        rules.add_format(format_of_entry(extra->node(), *text, label, base, awq));
    if (text < patterns) {
      rules.add_name(Names::kBelow, *text, format);
    } else {
      rules.add_pattern({ModulePattern::Kind::kSearch, *text, label}, format);
    }
  }
}

/// Names under the key: a list, a list of lists, or names between commas.
std::vector<std::string> names_of(const ConfigKeys& config, const char* key) {
  const nlohmann::json* value = config.find(key);
  if (!value) return {};
  std::vector<std::string> names;
  const auto add = [&](const nlohmann::json& element) {
    FUSEDMOE_CHECK_FILE(element.is_string(), config.label(key), ConfigKeys::text(element),
                        "names of modules");
    std::string_view text = element.get_ref<const std::string&>();
    while (!text.empty()) {
      const std::size_t comma = std::min(text.find(','), text.size());
      std::string_view name = text.substr(0, comma);
      while (name.starts_with(' ')) name.remove_prefix(1);
      while (name.ends_with(' ')) name.remove_suffix(1);
      if (!name.empty()) names.emplace_back(name);
      text.remove_prefix(std::min(comma + 1, text.size()));
    }
  };
  if (!value->is_array()) {
    add(*value);
    return names;
  }
  for (const nlohmann::json& element : *value) {
    if (!element.is_array()) {
      add(element);
      continue;
    }
    for (const nlohmann::json& name : element) add(name);
  }
  return names;
}

/// The base format for every module, or for those that the config lists: within a block, or blocks.
void add_base(const ConfigKeys& config, const Int4Settings& base, bool awq, ModuleRules& rules) {
  const std::size_t format =
      rules.add_format(read_format(config.path(), [&] { return scheme_of(config, base, awq); }));
  for (const char* key : {"modules_in_block_to_quantize", "block_name_to_quantize",
                          "to_quant_block_names", "quant_block_list"}) {
    const std::vector<std::string> names = names_of(config, key);
    if (names.empty()) continue;
    for (const std::string& name : names) rules.add_name(Names::kAnywhere, name, format);
    rules.add_every(rules.add_format({{}, config.label(key), {}}));
    return;
  }
  rules.add_every(format);
}

/// `gptq` names the layout; it stands under two keys.
Layout gptq_layout(const ConfigKeys& config) {
  // GPTQModel writes both keys.
  const char* format_key = config.find("checkpoint_format") ? "checkpoint_format" : "format";
  const std::string format = config.string(format_key, "gptq");
  FUSEDMOE_CHECK_SUPPORTED(format == "gptq" || format == "gptq_v2", kQuantScheme,
                           config.label(format_key), files::quote(format), "gptq or gptq_v2");
  const std::string other = config.string("format", format);
  FUSEDMOE_CHECK_FILE(other == format, config.label("format"), files::quote(other),
                      core::format("{}, as checkpoint_format", format));
  FUSEDMOE_CHECK_SUPPORTED(!config.boolean("is_marlin_format", false), kQuantScheme,
                           config.label("is_marlin_format"), "true", "false");
  return format == "gptq" ? Layout::kGptq : Layout::kGptqV2;
}

void check_awq(const ConfigKeys& config) {
  for (const char* key : {"version", "format", "checkpoint_format"}) {
    std::string text = config.string(key, "gemm");
    FUSEDMOE_CHECK_SUPPORTED(text == "gemm" || text == "GEMM", kQuantScheme, config.label(key),
                             files::quote(text), "gemm");
  }
}

QuantRules parse(const ConfigKeys& config, const KeyOrder& order, Layout layout) {
  const bool awq = layout == Layout::kAwq;
  config.check_known(awq ? "an AWQ config" : "a GPTQ config", {kOfModel, kInt4Module, kHarmless});
  const std::string words = config.string("pack_dtype", "int32");
  FUSEDMOE_CHECK_SUPPORTED(words == "int32", kQuantScheme, config.label("pack_dtype"),
                           files::quote(words), "int32");
  const std::string backend = config.string("backend", "");
  FUSEDMOE_CHECK_SUPPORTED(backend != "llm-awq", kQuantScheme, config.label("backend"),
                           files::quote(backend), "autoawq: llm-awq packs in another order");
  Int4Settings base = read_settings(config, {});
  if (awq) {
    FUSEDMOE_CHECK_FILE(config.find("group_size") || config.find("q_group_size"),
                        config.label("group_size"), "absent", "an integer");
    base.symmetric = !config.boolean("zero_point", true);
  }
  QuantRules rules;
  rules.layout = layout;
  rules.without_numbers = true;
  for (const char* list : {"modules_to_not_convert", "ignore"}) {
    add_plain_modules(config, list, ListPatterns::kRegex, rules.formats);
  }
  add_dynamic(config, order, base, awq, rules.formats);
  add_extra(config, order, base, awq, rules.formats);
  add_base(config, base, awq, rules.formats);
  return rules;
}

}  // namespace

QuantRules parse_gptq(const ConfigKeys& config, const KeyOrder& order) {
  return parse(config, order, gptq_layout(config));
}

QuantRules parse_awq(const ConfigKeys& config, const KeyOrder& order) {
  check_awq(config);
  return parse(config, order, Layout::kAwq);
}

QuantRules parse_auto_round(const ConfigKeys& config, const KeyOrder& order) {
  const std::string packing = config.string("packing_format", "");
  if (packing.ends_with("auto_gptq")) return parse_gptq(config, order);
  if (packing.ends_with("auto_awq")) return parse_awq(config, order);
  throw Error::unsupported(Reason::kQuantScheme, config.label("packing_format"),
                           files::quote(packing), "auto_round:auto_gptq or auto_round:auto_awq");
}

}  // namespace fusedmoe::checkpoint
