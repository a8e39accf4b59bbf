// Agreement before work: the ranks of a layer compare what they are about to make.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fusedmoe/layer.h"
#include "fusedmoe/simulation.h"

namespace fusedmoe::layer {

/// What has to be the same on every rank: names and values.
using Facts = std::vector<std::pair<std::string, std::string>>;

/// Calls `prepare` and compares its facts with those of the other ranks. If it throws on a rank, or
/// facts differ, all ranks throw an Error that names the ranks and what differs; the communicator
/// stays usable.
void agree(Communicator& communicator, const std::function<Facts()>& prepare);

/// Whether the layer is on several ranks with a communicator.
bool across_ranks(const LayerOptions& options);
/// Throws Error.
void check_number_of_lanes(int lanes);
/// The options with what follows from the communicator: groups, combine mode. Throws Error.
LayerOptions complete(LayerOptions options);
/// The weights with the rank's expert map and no other rank's experts. Throws Error.
LayerWeights complete(LayerWeights weights, const LayerOptions& options);
/// What the ranks compare.
Facts facts_of(const MoeConfig& config, const LayerWeights& weights, const LayerOptions& options,
               const Selection& selection);
/// Of costs that decide how rows travel: a fact for each number.
Facts facts_of(const RankCosts& costs);

}  // namespace fusedmoe::layer
