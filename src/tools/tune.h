// Tile plans, the ways in which experts can run a problem (Experts::tile_plans): measured once,
// kept in a file, pinned. They change the speed and, within rounding, the bits of a result; nobody
// needs them: without one, experts choose by themselves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/experts.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe {

/// While it lives, experts that the calling thread applies run the plan of this name, which counts
/// more than tuned plans do; an empty name turns those off. Experts choose by themselves where they
/// have no such plan for a problem: Experts::tile_plans tells. The innermost one counts.
class PinnedTilePlan {
 public:
  explicit PinnedTilePlan(std::string name);
  ~PinnedTilePlan();
  PinnedTilePlan(const PinnedTilePlan&) = delete;
  PinnedTilePlan& operator=(const PinnedTilePlan&) = delete;

 private:
  std::optional<std::string> outer_;
};

/// The fastest plan of one problem. All but the last two members are the key.
struct TunedPlan {
  std::string device;       ///< device_name()
  std::string experts;      ///< Experts::name()
  std::int64_t hidden = 0;  ///< this and the next four: of the ProblemSize
  std::int64_t intermediate = 0;
  std::int64_t num_local_experts = 0;
  std::int64_t topk = 0;  ///< 1 for the batched format
  std::int64_t num_tokens = 0;
  std::string plan;    ///< of Experts::tile_plans
  double time_us = 0;  ///< that it took

  bool operator==(const TunedPlan&) const = default;
};

/// Tuned plans of any number of devices, experts and problems.
class TunedPlans {
 public:
  /// {"version": 1, "plans": [objects with the members of TunedPlan]}. Throws Error for anything
  /// else: other members or types, sizes below 1, a key that comes twice.
  static TunedPlans parse(std::string_view json);
  static TunedPlans load(const std::filesystem::path& path);
  std::string json() const;
  /// Makes the folder where it is missing; the file appears complete or not at all.
  void save(const std::filesystem::path& path) const;

  /// Adds a plan, or replaces the one of the same key. Throws as parse() does.
  void set(TunedPlan plan);
  /// The plan for the problem, or the one for the nearest number of tokens, up to twice or half as
  /// many, the larger of two equally near. Null where there is none. The dtype and the scheme are
  /// the experts' matter.
  const TunedPlan* find(std::string_view device, std::string_view experts,
                        const ProblemSize& problem) const;
  std::span<const TunedPlan> plans() const { return plans_; }

 private:
  std::vector<TunedPlan> plans_;  // ascending keys
};

/// The file that the library reads: what the environment variable FUSEDMOE_TUNED_PLANS says, else
/// fusedmoe/tuned_plans.json in $XDG_CACHE_HOME or ~/.cache. Empty where the variable is, or where
/// there is no home: no file is read.
std::filesystem::path tuned_plans_path();

/// Those of that file, read once, when experts that have tile plans are first asked. Throws Error
/// if the variable names a file that cannot be read; a cached one that cannot counts as empty.
const TunedPlans& tuned_plans();

}  // namespace fusedmoe
