// What a quantization config says about each module of a model, whatever tool wrote it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "checkpoint/module_pattern.h"
#include "fusedmoe/checkpoint.h"

namespace fusedmoe::checkpoint {

/// How modules are quantized, and which words of the config say so.
struct ModuleFormat {
  std::optional<QuantScheme> scheme{};  ///< without `down`; nothing: not quantized
  std::string source;                   ///< "config.quantization_config.ignore"
  /// Of a format that nothing here reads: thrown when an expert has it.
  std::optional<Error> refusal{};
};
/// "mxfp4_w4a16", or "not quantized".
std::string text_of(const ModuleFormat& format);
/// Its source, or where it has none the config as a whole.
std::string source_of(const ModuleFormat& format);

/// An ordered list of rules: names or patterns of modules, and their format. The first one that
/// fits a module decides.
class ModuleRules {
 public:
  /// Which modules a name in a rule means.
  enum class Names {
    kExact,     ///< that module
    kBelow,     ///< it and those below it; the longest name wins
    kAnywhere,  ///< those whose name holds it as whole segments
  };

  std::size_t add_format(ModuleFormat format);
  void add_name(Names names, std::string name, std::size_t format);
  /// Of two rules that fit, both with an order, the one before must also come first in the order of
  /// their texts: readers differ in which of them they take.
  void add_pattern(ModulePattern pattern, std::size_t format, std::string order = {});
  /// `linear`: for every linear layer, so not for stacks of experts.
  void add_every(std::size_t format, bool linear = false);

  struct Found {
    const ModuleFormat* format = nullptr;    ///< null: no rule fits
    bool named = false;                      ///< by a rule for some names
    const ModulePattern* pattern = nullptr;  ///< that of the rule, if it has one
    bool linear = false;                     ///< by a rule for linear layers alone
  };
  /// Remembers what patterns say about names: one for each thread.
  class Lookup {
   public:
    explicit Lookup(const ModuleRules& rules) : rules_(&rules), memos_(rules.rules_.size()) {}
    /// Throws Error where two rules contradict each other.
    Found find(const std::string& module);

   private:
    bool fits(std::size_t rule, const std::string& module);
    const ModuleRules* rules_;
    std::vector<ModulePattern::Memo> memos_;
  };

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>()(text);
    }
  };
  struct NameSet {
    Names names;
    std::unordered_map<std::string, std::size_t, Hash, std::equal_to<>> formats;
    std::size_t longest = 0;  ///< in segments
    std::optional<std::size_t> find(std::string_view module) const;
  };
  struct PatternRule {
    ModulePattern pattern;
    std::size_t format;
    std::string order;
  };
  struct Every {
    std::size_t format;
    bool linear;
  };

  std::vector<ModuleFormat> formats_;
  std::vector<std::variant<NameSet, PatternRule, Every>> rules_;
};

struct QuantRules {
  CheckpointLayout layout = CheckpointLayout::kPlain;  ///< of quantized modules
  ModuleRules formats;
  /// Readers match the experts of a layer as one module, without their numbers, which a pattern for
  /// layers may hit by chance: ".*\.1\..*".
  bool without_numbers = false;
  /// Changes of inputs and outputs at run time: what they find is refused.
  std::vector<ModuleRules> transforms;
};

}  // namespace fusedmoe::checkpoint
