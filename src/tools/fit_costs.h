// What ranks cost, from what was measured on a few of them.
#pragma once

#include <string>

#include "fusedmoe/simulation.h"

namespace fusedmoe {

/// What was measured on a rank: how long so many bytes took from it or to it.
struct LinkSample {
  double bytes = 0, us = 0;
};
/// How long experts took that read so many bytes of weights, and multiplied so much.
struct ExpertsSample {
  double bytes = 0, flops = 0, us = 0;
};
/// The costs that explain both samples. Throw Error where none do.
LinkCost fit_link(const LinkSample& few, const LinkSample& many, std::string source);
/// A way there and back that was timed as one: each of the two.
LinkCost each_way(LinkCost both);
ExpertsCost fit_experts(const ExpertsSample& few, const ExpertsSample& many, std::string source);

}  // namespace fusedmoe
