// How the modules of one layer are quantized, by the rules of the config.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/block_tensors.h"
#include "checkpoint/quant_rules.h"

namespace fusedmoe::checkpoint {

/// Of gate and up, and of down.
struct ExpertFormats {
  ModuleFormat first, down;
  bool linear = false;  ///< by a rule for linear layers alone
  /// Set where the experts' own names say different formats, and these are those of names without
  /// numbers: to be thrown unless every tensor fits them.
  std::optional<Error> mixture{};
};

/// Asks the rules under the names that they have for the layer: those of the file, or others that
/// the family's layers go by, where the rules name only those.
class LayerModules {
 public:
  /// `prefix`: before the names of `layout`, "model.layers.3.".
  LayerModules(const QuantRules& rules, const FamilyRow& row, const std::string& prefix,
               const BlockLayout& layout);

  /// Whether the rules are asked under other names than those of the file.
  bool renamed() const { return renamed_; }
  void use_names_of_file();

  /// Of all experts. Throws Error naming two modules if they differ otherwise than in the format of
  /// the down matrices' weights, and for a format or a transform that nothing here computes.
  ExpertFormats experts(std::int64_t num_experts);
  /// Of a linear layer beside the experts, "mlp.shared_expert.up_proj".
  const ModuleFormat& beside(const std::string& layer);
  /// Throws Error if a transform reaches this layer.
  void check_transforms(const std::string& module);

 private:
  struct Naming {
    std::string prefix, block;
    const ExpertLayout* experts = nullptr;
  };
  static std::vector<std::string> patterns(const ExpertLayout& layout);
  static std::string module_name(const Naming& naming, const std::string& pattern,
                                 std::int64_t expert);
  /// Of the experts' matrices those that some rule was written for under these names.
  int names_in_rules(const Naming& naming);
  /// Throws Error where gate and up, or the inputs of down, differ.
  ExpertFormats formats_of(const std::vector<std::string>& modules);
  std::vector<std::string> modules(std::int64_t expert) const;
  std::vector<std::string> modules_without_numbers() const;
  const ModuleFormat& find(const std::string& module);

  const QuantRules* rules_;
  ModuleRules::Lookup formats_;
  std::vector<ModuleRules::Lookup> transforms_;
  Naming own_, naming_;  ///< of the file, and as the rules have them
  bool renamed_ = false;
};

/// The scheme of the first layer whose experts the config says are quantized, without a look at
/// tensors; nothing if it says so of none.
std::optional<QuantScheme> configured_scheme(const ModelConfig& model);

}  // namespace fusedmoe::checkpoint
