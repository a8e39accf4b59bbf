// The registry of implementations, and the choice among them that explains itself.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/experts.h"
#include "fusedmoe/export.h"
#include "fusedmoe/modular_kernel.h"

namespace fusedmoe {

/// Every PrepareAndFinalize and Experts this build has, best first, reference last. A monolithic
/// adapter and unfused experts follow the modular experts that serve the same without them, so
/// they are chosen on demand only: by name, or for MoeConfig::hooks.
FUSEDMOE_API std::span<const std::shared_ptr<const PrepareAndFinalize>> all_prepare_finalize();
FUSEDMOE_API std::span<const std::shared_ptr<const Experts>> all_experts();

/// One pair and whether it can serve the configuration.
struct Candidate {
  std::shared_ptr<const PrepareAndFinalize> prepare_finalize;
  std::shared_ptr<const Experts> experts;
  Support support;
  bool chosen = false;
};

/// What runs a configuration, as data: saved in one process, pinned in another.
struct FUSEDMOE_API Plan {
  std::string experts, prepare_finalize;
  std::string scheme, dtype, device, isa;
  int layout_version = 1;  ///< of the packed weights
  /// Of a layer that has shared experts: "cpu+no_ep" and their scheme; else empty.
  std::string shared_experts, shared_scheme;

  bool operator==(const Plan&) const = default;
  /// A JSON object with these members; the shared ones only where set.
  std::string json() const;
  /// Inverse. Throws Error naming what is missing, unknown or of another type.
  static Plan parse(std::string_view json);
};

/// The chosen pair, and for every other the reason it was not chosen.
struct FUSEDMOE_API Selection {
  std::shared_ptr<const PrepareAndFinalize> prepare_finalize;  ///< null when nothing fits
  std::shared_ptr<const Experts> experts;
  std::vector<Candidate> candidates;  ///< in order of preference
  MoeConfig config;                   ///< what was asked

  explicit operator bool() const { return experts != nullptr; }
  /// Text table: chosen mark, experts, prepare_finalize, format, code, reason.
  std::string table() const;
  /// The same as a JSON array of objects: chosen, experts, prepare_finalize, activation_format,
  /// monolithic, supported, code, reason.
  std::string json() const;
  /// Throws Error when nothing fits.
  Plan plan() const;
};

/// Which pairs fit `config`, and the first that does: pairs of one activation format first, then
/// those that cannot be paired. MoeConfig::activation_format is a wish that pairs of the other
/// format fail. Pure; needs no weights and no device. Never throws for an unsupported
/// configuration: see Selection::operator bool.
FUSEDMOE_API Selection explain(const MoeConfig& config);

/// As explain(), but `require` (an Experts name, optionally "experts+prepare_finalize") must be
/// what is chosen: throws Error with its reason instead of choosing another. A required name also
/// decides the activation format. An empty `require` takes the best; if nothing fits the Error
/// holds the whole table.
FUSEDMOE_API Selection select(const MoeConfig& config, std::string_view require = {});

/// The pair of the plan, or an Error: with the reason of a pair that cannot serve `config`, or with
/// what differs between the plan and what it would be now ("plan.isa", ...). Shared experts are
/// not compared.
FUSEDMOE_API Selection select(const MoeConfig& config, const Plan& plan);

}  // namespace fusedmoe
