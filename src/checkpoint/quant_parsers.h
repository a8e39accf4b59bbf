// The quantization configs of the tools, and what their parsers share.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config_keys.h"
#include "checkpoint/quant_rules.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {

/// `scale_dtype` of compressed-tensors where scales are E8M0.
inline constexpr const char* kE8M0Scales = "torch.uint8";

inline constexpr std::int64_t kMaxGroup = 1 << 16;

/// quant_method compressed-tensors, modelopt, gptq, awq and auto-round. `packing`: what AutoRound
/// stores its weights as, gptq or awq.
QuantRules parse_compressed_tensors(const ConfigKeys& config, const KeyOrder& order);
QuantRules parse_modelopt(const ConfigKeys& config);
QuantRules parse_gptq(const ConfigKeys& config, const KeyOrder& order);
QuantRules parse_awq(const ConfigKeys& config, const KeyOrder& order);
QuantRules parse_auto_round(const ConfigKeys& config, const KeyOrder& order);

/// ModelOpt's names of schemes.
const std::vector<NamedScheme>& modelopt_algorithms();

/// The format that `read` returns; an Error of it is thrown when an expert has the format.
ModuleFormat read_format(std::string source,
                         const std::function<std::optional<QuantScheme>()>& read);

/// Modules that a list of the config leaves as they are, by names, parts of names in whole
/// segments, or patterns: those of ModelOpt are globs, those of transformers regular expressions.
enum class ListPatterns { kRegex, kGlob };
void add_plain_modules(const ConfigKeys& config, std::string_view key, ListPatterns patterns,
                       ModuleRules& rules);

/// The keys of the object under `key`, in the order of the text.
std::vector<std::string> keys_in_order(const ConfigKeys& object, const std::string& key,
                                       const KeyOrder& order);

}  // namespace fusedmoe::checkpoint
