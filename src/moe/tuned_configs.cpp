#include "moe/tuned_configs.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "core/check.h"

namespace fusedmoe {
namespace {

auto layer_of(const TunedConfig& c) {
  return std::tie(c.device, c.experts, c.scheme, c.hidden, c.intermediate, c.num_local_experts,
                  c.topk);
}

auto key_of(const TunedConfig& c) {
  return std::tuple_cat(layer_of(c), std::tie(c.num_tokens));
}

void check(const TunedConfig& config) {
  const std::pair<const char*, const std::string*> names[] = {{"device", &config.device},
                                                              {"experts", &config.experts},
                                                              {"scheme", &config.scheme},
                                                              {"config", &config.config}};
  for (const auto& [argument, text] : names) {
    FUSEDMOE_CHECK(!text->empty(), argument, "empty", "a name");
  }
  const std::pair<const char*, std::int64_t> sizes[] = {
      {"hidden", config.hidden},
      {"intermediate", config.intermediate},
      {"topk", config.topk},
      {"num_local_experts", config.num_local_experts},
      {"num_tokens", config.num_tokens}};
  for (const auto& [argument, size] : sizes) {
    FUSEDMOE_CHECK(size >= 1, argument, core::to_string(size), "at least 1");
  }
  FUSEDMOE_CHECK(std::isfinite(config.time_us) && config.time_us >= 0, "time_us",
                 core::to_string(config.time_us), "finite and not negative");
}

}  // namespace

void TunedConfigs::set(TunedConfig config) {
  check(config);
  const auto place = std::lower_bound(
      configs_.begin(), configs_.end(), config,
      [](const TunedConfig& a, const TunedConfig& b) { return key_of(a) < key_of(b); });
  if (place != configs_.end() && key_of(*place) == key_of(config)) {
    *place = std::move(config);
  } else {
    configs_.insert(place, std::move(config));
  }
}

std::span<const TunedConfig> TunedConfigs::of_layer(const TunedConfig& layer) const {
  const auto [first, last] = std::equal_range(
      configs_.begin(), configs_.end(), layer,
      [](const TunedConfig& a, const TunedConfig& b) { return layer_of(a) < layer_of(b); });
  return {first, last};
}

}  // namespace fusedmoe
