// Kernel configurations that were measured to be the fastest of their problems.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fusedmoe/experts.h"
#include "fusedmoe/runtime.h"

namespace fusedmoe {

/// The fastest configuration of one problem. All but the last three members are the key.
struct TunedConfig {
  std::string device;       ///< device_name()
  std::string experts;      ///< ExpertsDescriptor::name()
  std::string scheme;       ///< of the weights and activations
  std::int64_t hidden = 0;  ///< this and the next four: of the ProblemSize
  std::int64_t intermediate = 0;
  std::int64_t num_local_experts = 0;
  std::int64_t topk = 0;  ///< 1 for the batched format
  std::int64_t num_tokens = 0;
  std::string config;       ///< of Experts::kernel_configs
  double time_us = 0;       ///< that it took
  std::string measured_by;  ///< where it came from a report; empty: measured here

  bool operator==(const TunedConfig&) const = default;
};

/// Those of any number of devices, experts and problems.
class TunedConfigs {
 public:
  /// Adds a configuration, or replaces the one of the same key. Throws Error for empty names, sizes
  /// below 1, and times that are not finite or negative.
  void set(TunedConfig config);
  /// Those of one device, experts and layer, ascending by number of tokens; num_tokens and
  /// what is not the key of `layer` do not count.
  std::span<const TunedConfig> of_layer(const TunedConfig& layer) const;
  std::span<const TunedConfig> all() const { return configs_; }

 private:
  std::vector<TunedConfig> configs_;  // ascending keys
};

/// The configuration for the number of tokens nearest to num_tokens, at most twice or half as many;
/// of two equally near the larger. Only configurations for which fits(config) is true count. Null
/// where there is none. `configs` have a member num_tokens and ascend by it.
template <typename Config, typename Fits>
const Config* nearest(std::span<const Config> configs, std::int64_t num_tokens, const Fits& fits) {
  const auto times = [num_tokens](std::int64_t tokens) {
    return static_cast<double>(std::max(tokens, num_tokens)) /
           static_cast<double>(std::min(tokens, num_tokens));
  };
  const Config* best = nullptr;
  for (const Config& config : configs) {
    const double far = times(config.num_tokens);
    if (far <= 2 && fits(config) && (!best || far <= times(best->num_tokens))) best = &config;
  }
  return best;
}

}  // namespace fusedmoe
