// The config of NVIDIA's ModelOpt: one algorithm for all modules, or a table of them.
// Sources: hf_quant_config.json and config.json of ModelOpt's exports, and how vLLM reads them.
#include <array>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/quant_parsers.h"
#include "core/check.h"
#include "files/safetensors_header.h"

namespace fusedmoe::checkpoint {
namespace {

using Names = ModuleRules::Names;

constexpr auto kModelOptKeys = std::to_array<std::string_view>(
    {"quant_method", "quantization", "quant_algo", "moe_quant_algo", "group_size", "ignore",
     "exclude_modules", "quantized_layers", "config_groups", "has_zero_point", "pre_quant_scale",
     // Of attention, and who wrote the file.
     "kv_cache_quant_algo", "kv_cache_scheme", "producer", "provider", "version"});

constexpr auto kModelOptModule = std::to_array<std::string_view>(
    {"quant_algo", "group_size", "has_zero_point", "pre_quant_scale"});

constexpr auto kModelOptGroup = std::to_array<std::string_view>(
    {"targets", "weights", "input_activations", "output_activations", "quant_algo", "group_size"});

constexpr auto kOfOperand = std::to_array<std::string_view>(
    {"num_bits", "type", "group_size", "strategy", "dynamic", "symmetric", "block_structure",
     "observer", "observer_kwargs"});

/// In upper case: ModelOpt writes some names in lower case, as "fp8_pb_wo".
std::string algorithm_of(const ConfigKeys& config) {
  std::string text = config.string("quant_algo", "");
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

QuantScheme scheme_of(const ConfigKeys& config) {
  for (const char* key : {"has_zero_point", "pre_quant_scale"}) {
    FUSEDMOE_CHECK_SUPPORTED(!config.boolean(key, false), kQuantScheme, config.label(key), "true",
                             "false");
  }
  const std::string algorithm = algorithm_of(config);
  std::string known;
  for (const NamedScheme& row : modelopt_algorithms()) {
    known += (known.empty() ? "" : ", ") + row.name;
    if (algorithm != row.name) continue;
    const std::int64_t group = row.scheme.weights.group.cols;
    const std::int64_t stored = config.integer("group_size", 0, kMaxGroup, group);
    FUSEDMOE_CHECK_SUPPORTED(group < 0 || stored == group, kQuantScheme, config.label("group_size"),
                             core::to_string(stored), core::format("{} for {}", group, row.name));
    return row.scheme;
  }
  throw Error::unsupported(Reason::kQuantScheme, config.label("quant_algo"),
                           files::quote(config.string("quant_algo", "")), "one of " + known);
}

constexpr std::int64_t kNoGroup = 0;

/// `config_groups` repeats the algorithm in the words of compressed-tensors, and alone may say that
/// the inputs of some modules are not quantized.
class Groups {
 public:
  explicit Groups(const ConfigKeys& config) {
    const std::optional<ConfigKeys> groups = config.object("config_groups");
    if (!groups) return;
    for (const auto& [name, value] : groups->node().items()) {
      const std::string label = core::format("{}.{}", groups->path(), files::quote(name));
      FUSEDMOE_CHECK_FILE(value.is_object(), label, ConfigKeys::text(value), "an object");
      const ConfigKeys group(value, label);
      group.check_known("a group", {kModelOptGroup});
      const std::optional<ConfigKeys> weights = group.object("weights");
      if (!weights) continue;
      const std::optional<ConfigKeys> inputs = group.object("input_activations");
      for (const auto& operand : {weights, inputs}) {
        if (operand) operand->check_known("a group of modules", {kOfOperand});
      }
      const Group said{label, weights->integer("num_bits", 1, 64, 8),
                       weights->integer("group_size", -1, kMaxGroup, kNoGroup),
                       weights->string("type", "float"), !inputs};
      const std::vector<std::string> targets =
          group.find("targets") ? group.strings("targets") : std::vector<std::string>{"Linear"};
      for (const std::string& target : targets) {
        const bool all = target == "Linear" || target == "FusedMoE";
        if (all && !all_) all_ = groups_.size();
        if (!all) targets_.emplace(target, groups_.size());
      }
      groups_.push_back(said);
    }
  }

  /// The scheme that the group of this module leaves of the algorithm's. `module`: empty for all.
  QuantScheme apply(QuantScheme scheme, const std::string& module) const {
    const Group* group = find(module);
    if (!group) return scheme;
    const std::int64_t bits = scheme.weights.value == DType::kE2M1 ? 4 : 8;
    FUSEDMOE_CHECK_FILE(group->bits == bits, group->label + ".weights.num_bits",
                        core::to_string(group->bits),
                        core::format("{} for {}, which quant_algo says", bits, name(scheme)));
    FUSEDMOE_CHECK_FILE(group->type == "float", group->label + ".weights.type",
                        files::quote(group->type), "\"float\" for what quant_algo says");
    const std::int64_t columns = scheme.weights.group.cols;
    FUSEDMOE_CHECK_SUPPORTED(
        columns < 0 || group->columns == kNoGroup || group->columns == columns, kQuantScheme,
        group->label + ".weights.group_size", core::to_string(group->columns),
        core::format("{} for {}, which quant_algo says", columns, name(scheme)));
    FUSEDMOE_CHECK_FILE(group->weights_only || scheme.activations,
                        group->label + ".input_activations", "an object",
                        core::format("null for {}, which quant_algo says", name(scheme)));
    if (group->weights_only) scheme.activations.reset();
    return scheme;
  }

 private:
  struct Group {
    std::string label;
    std::int64_t bits;
    std::int64_t columns;  ///< in a group; kNoGroup: not said
    std::string type;
    bool weights_only;

    bool same_format(const Group& other) const {
      return bits == other.bits && columns == other.columns && type == other.type &&
             weights_only == other.weights_only;
    }
  };

  /// That of the module, or of the modules below it, which must agree.
  const Group* find(const std::string& module) const {
    const Group* found = nullptr;
    if (const auto exact = targets_.find(module); exact != targets_.end()) {
      return &groups_[exact->second];
    }
    const std::string below = module + ".";
    for (auto at = targets_.lower_bound(below);
         !module.empty() && at != targets_.end() && at->first.starts_with(below); ++at) {
      const Group& group = groups_[at->second];
      if (found && !found->same_format(group)) {
        throw Error::unsupported(
            Reason::kQuantScheme, group.label,
            core::format(
                "{} and {} say different formats for modules below {}, which must have one",
                group.label, found->label, files::quote(module)));
      }
      found = &group;
    }
    if (found || !all_) return found;
    return &groups_[*all_];
  }

  std::vector<Group> groups_;
  std::map<std::string, std::size_t> targets_;
  std::optional<std::size_t> all_;
};

void add_table(const ConfigKeys& config, const Groups& groups, ModuleRules& rules) {
  const std::optional<ConfigKeys> table = config.object("quantized_layers");
  FUSEDMOE_CHECK_FILE(table, config.label("quantized_layers"), "absent",
                      "an object, for quant_algo MIXED_PRECISION");
  // Thousands of modules have few formats.
  std::map<std::pair<std::string, bool>, std::size_t> known;
  for (const auto& [module, value] : table->node().items()) {
    const std::string source = core::format("{}.{}", table->path(), files::quote(module));
    bool weights_only = false;
    const ModuleFormat format = read_format(source, [&, &module = module, &value = value] {
      FUSEDMOE_CHECK_FILE(value.is_object(), source, ConfigKeys::text(value), "an object");
      const ConfigKeys own(value, source);
      own.check_known("a module's settings", {kModelOptModule});
      const QuantScheme scheme = groups.apply(scheme_of(own), module);
      weights_only = !scheme.activations;
      return scheme;
    });
    const auto [entry, is_new] =
        known.try_emplace({format.refusal ? source : value.dump(), weights_only}, 0);
    if (is_new) entry->second = rules.add_format(format);
    if (module.find_first_of("*?") == std::string::npos) {
      rules.add_name(Names::kBelow, module, entry->second);
    } else {
      rules.add_pattern({ModulePattern::Kind::kGlob, module, source}, entry->second);
    }
  }
  rules.add_every(rules.add_format({{}, table->path(), {}}));
}

}  // namespace

const std::vector<NamedScheme>& modelopt_algorithms() {
  static const std::vector<NamedScheme> table{
      {"FP8", {keys::e4m3_tensor(), keys::e4m3_tensor(false)}},
      {"FP8_PB_WO", {keys::e4m3_block(), std::nullopt}},
      {"FP8_PER_CHANNEL_PER_TOKEN", {keys::e4m3_row(), keys::e4m3_row(true)}},
      {"NVFP4", {keys::nvfp4(), keys::nvfp4(true)}},
      {"W4A16_NVFP4", {keys::nvfp4(), std::nullopt}},
      {"MXFP8", {keys::mxfp8(), keys::mxfp8(true)}}};
  return table;
}

QuantRules parse_modelopt(const ConfigKeys& config) {
  // hf_quant_config.json nests the same keys in `quantization`.
  const ConfigKeys keys = config.object("quantization").value_or(config);
  config.check_known("a ModelOpt config", {kModelOptKeys});
  keys.check_known("a ModelOpt config", {kModelOptKeys});
  const Groups groups(keys);
  QuantRules rules;
  rules.layout = CheckpointLayout::kModelOpt;
  for (const char* list : {"exclude_modules", "ignore"}) {
    add_plain_modules(keys, list, ListPatterns::kGlob, rules.formats);
  }
  const std::string algorithm = algorithm_of(keys);
  if (algorithm == "MIXED_PRECISION") {
    add_table(keys, groups, rules.formats);
    return rules;
  }
  // Where only the cache of attention is quantized, the algorithm is null.
  const bool none = keys.node().contains("quant_algo") && !keys.find("quant_algo");
  rules.formats.add_every(rules.formats.add_format(
      read_format(keys.label("quant_algo"), [&]() -> std::optional<QuantScheme> {
        if (none) return std::nullopt;
        return groups.apply(scheme_of(keys), "");
      })));
  return rules;
}

}  // namespace fusedmoe::checkpoint
