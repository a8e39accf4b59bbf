// A layer on GPUs whose rows go to other ranks.
#pragma once

#include "fusedmoe/simulation.h"

namespace fusedmoe::testing {

inline constexpr std::int64_t kMostRows = 8192;  ///< tokens of a rank

inline MoeConfig rank_config(int num_ranks, const char* scheme = "bf16") {
  MoeConfig config;
  config.num_experts = 256;
  config.num_local_experts = 256 / num_ranks;
  config.topk = 8;
  config.hidden = 7168;
  config.intermediate = 2048;
  config.scheme = parse_scheme(scheme);
  config.device = {DeviceKind::kCuda, 0};
  config.compute_capability = 90;
  config.has_expert_map = true;
  config.parallel = ParallelConfig::of({.dp_size = num_ranks, .expert_parallel = true});
  return config;
}

}  // namespace fusedmoe::testing
