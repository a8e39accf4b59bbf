// The router in double: the oracle for src/moe/router.cpp. A token at a time, sorting everything.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fusedmoe/router.h"

namespace fusedmoe::reference {

/// Logit of one expert for row `token` of x. Allocates nothing.
double router_logit(const RouterWeights& weights, const TensorView& x, std::int64_t token,
                    std::int64_t expert);

/// Logits of every expert for row `token` of x: x weight^T + bias.
std::vector<double> router_logits(const RouterWeights& weights, const TensorView& x,
                                  std::int64_t token);

struct RoutedToken {
  std::vector<std::int32_t> ids;  ///< (topk), by descending choice score
  std::vector<double> weights;    ///< (topk)
  std::vector<double> choice;     ///< (num_choices): what experts are chosen and ordered by
};

/// Everything but custom routing. `correction_bias` is empty or has num_choices elements.
RoutedToken route_token(const RouterConfig& config, std::span<const double> logits,
                        std::span<const float> correction_bias);

}  // namespace fusedmoe::reference
