// The registry of implementations, and the choice among them that explains itself.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/experts.h"
#include "fusedmoe/export.h"
#include "fusedmoe/modular_kernel.h"

namespace fusedmoe {

/// Every descriptor that this build has, best first, the reference last.
FUSEDMOE_API std::span<const PrepareFinalizeDescriptor* const> all_prepare_finalize();
FUSEDMOE_API std::span<const ExpertsDescriptor* const> all_experts();

/// One pair and whether it can serve the configuration.
struct Candidate {
  const PrepareFinalizeDescriptor* prepare_finalize = nullptr;
  const ExpertsDescriptor* experts = nullptr;
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
  /// Of a layer across ranks: how rows, or parts of sums, come to other ranks, see
  /// ModularKernel::rows_travel(); else empty. Not pinned: it follows from the ranks.
  std::string rows_travel;

  bool operator==(const Plan&) const = default;
  /// A JSON object with these members; the last three only where set.
  std::string json() const;
  /// Inverse. Throws Error naming what is missing, unknown or of another type.
  static Plan parse(std::string_view json);
};

/// The chosen pair, and for every other the reason it was not chosen.
struct FUSEDMOE_API Selection {
  const PrepareFinalizeDescriptor* prepare_finalize = nullptr;  ///< null when nothing fits
  const ExpertsDescriptor* experts = nullptr;
  std::vector<Candidate> candidates;  ///< in order of preference
  MoeConfig config;                   ///< what was asked

  explicit operator bool() const { return experts != nullptr; }
  /// "cpu+no_ep".
  std::string pair() const;
  /// The instances that run the configuration. Throws Error when nothing fits.
  ModularKernel create(const Context& context) const;
  /// Bytes that the packed weights of this rank will take, see ExpertsDescriptor::packed_bytes().
  /// Throws Error when nothing fits.
  std::int64_t packed_bytes() const;
  /// Bytes of memory that the GPU of each rank lends the others for such a layer, where its rows or
  /// sums travel that way: see Communicator::map_peers(). Depends on max_tokens_per_rank,
  /// combine_dtype and the combine mode. Where neither combine nor combine_dtype is given, the mode
  /// is that which rank_costs() predict to be faster. 0 on the CPU, and where rows stay on one
  /// rank. Throws Error when nothing fits, or for a file of costs that cannot be read.
  std::size_t peer_bytes(const RankOptions& ranks) const;
  /// The same of a configuration of one rank, where its experts are spread over so many ranks that
  /// have tokens of their own. Depends on RankOptions::combine, too.
  std::size_t peer_bytes(const RankOptions& ranks, int num_ranks) const;
  /// Text table: chosen mark, experts, prepare_finalize, format, code, how it runs or why not.
  std::string table() const;
  /// The same as a JSON array of objects: chosen, experts, prepare_finalize, activation_format,
  /// supported, code, reason, runs.
  std::string json() const;
  /// Throws Error when nothing fits.
  Plan plan() const;
};

/// Which pairs fit `config`, and the first that does and need not be asked for by name. A pair is a
/// row where its experts know the activation format of its prepare/finalize.
/// MoeConfig::activation_format is a wish that pairs of the other format fail. Pure; needs no
/// weights, and no device where the configuration names a compute capability. Never throws for an
/// unsupported configuration: see Selection::operator bool.
FUSEDMOE_API Selection explain(const MoeConfig& config);

/// As explain(), but `require` (the name of experts, optionally "experts+prepare_finalize") must be
/// what is chosen: throws Error with its reason instead of choosing another. A required
/// prepare/finalize also decides the activation format. An empty `require` takes the best; if
/// nothing fits the Error holds every reason.
FUSEDMOE_API Selection select(const MoeConfig& config, std::string_view require = {});

/// The pair of the plan, or an Error: with the reason of a pair that cannot serve `config`, or with
/// what differs between the plan and what it would be now ("plan.isa", ...). Shared experts are
/// not compared.
FUSEDMOE_API Selection select(const MoeConfig& config, const Plan& plan);

/// A context with the kernel configurations tuned on this machine.
FUSEDMOE_API Context make_context();

}  // namespace fusedmoe
