// Loads of experts, and placements that balance them.
#include "fusedmoe/balance.h"

#include <algorithm>
#include <string>
#include <vector>

#include "capi/communicator.h"
#include "capi/convert.h"

struct fusedmoe_load_window {
  fusedmoe::LoadWindow window;
};

struct fusedmoe_balanced {
  struct Layer {
    std::string placement;
    double before, after;
  };
  std::vector<Layer> layers;
};

namespace fusedmoe::capi {
namespace {

BalanceOptions to_options(const fusedmoe_balance_options* options) {
  const fusedmoe_balance_options o = read_struct(options, "options");
  const auto size_of = [](std::int32_t size) { return size == 0 ? 1 : size; };
  BalanceOptions result{size_of(o.num_ranks), o.redundant, size_of(o.num_hosts), o.num_groups, {}};
  if (o.num_placements < 0) {
    throw Error("options.num_placements", std::to_string(o.num_placements), "not negative");
  }
  if (o.num_placements > 0) given(o.placements, "options.placements");
  for (std::int64_t i = 0; i < o.num_placements; ++i) {
    result.placements.push_back(
        ExpertPlacement::parse(&given(o.placements[i], "options.placements")));
  }
  return result;
}

}  // namespace
}  // namespace fusedmoe::capi

using fusedmoe::capi::given;
using fusedmoe::capi::guarded;

fusedmoe_status fusedmoe_load_window_create(int64_t num_layers, int64_t num_experts,
                                            int64_t num_forwards, fusedmoe_load_window** window) {
  return guarded([&] {
    given(window, "window");
    *window = new fusedmoe_load_window{{num_layers, num_experts, num_forwards}};
  });
}

fusedmoe_status fusedmoe_load_window_add(fusedmoe_load_window* window, int64_t layer,
                                         const fusedmoe_tensor* expert_load) {
  return guarded([&] {
    given(window, "window").window.add(layer, fusedmoe::capi::to_view(expert_load, "expert_load"));
  });
}

fusedmoe_status fusedmoe_load_window_get(const fusedmoe_load_window* window,
                                         fusedmoe_communicator* communicator, double* loads,
                                         size_t count) {
  return guarded([&] {
    const fusedmoe::LoadWindow& of = given(window, "window").window;
    given(loads, "loads");
    const std::vector<double> all =
        communicator ? of.loads(*communicator->communicator) : of.loads();
    if (count != all.size()) {
      throw fusedmoe::Error("count", std::to_string(count), std::to_string(all.size()));
    }
    std::copy(all.begin(), all.end(), loads);
  });
}

fusedmoe_status fusedmoe_load_window_clear(fusedmoe_load_window* window) {
  return guarded([&] { given(window, "window").window.clear(); });
}

void fusedmoe_load_window_destroy(fusedmoe_load_window* window) {
  delete window;
}

fusedmoe_status fusedmoe_balance(const double* loads, int64_t num_layers, int64_t num_experts,
                                 const fusedmoe_balance_options* options,
                                 fusedmoe_balanced** balanced) {
  return guarded([&] {
    given(loads, "loads");
    given(balanced, "balanced");
    constexpr std::int64_t kMost = std::int64_t{1} << 20;
    for (const auto& [name, size] :
         {std::pair("num_layers", num_layers), std::pair("num_experts", num_experts)}) {
      if (size >= 1 && size <= kMost) continue;
      throw fusedmoe::Error(name, std::to_string(size), "in [1, " + std::to_string(kMost) + "]");
    }
    auto result = std::make_unique<fusedmoe_balanced>();
    for (const fusedmoe::BalancedLayer& layer :
         fusedmoe::balance({loads, static_cast<std::size_t>(num_layers * num_experts)}, num_experts,
                           fusedmoe::capi::to_options(options))) {
      result->layers.push_back({layer.placement.json(), layer.before, layer.after});
    }
    *balanced = result.release();
  });
}

fusedmoe_status fusedmoe_balanced_get(const fusedmoe_balanced* balanced, int64_t layer,
                                      fusedmoe_balanced_layer* values) {
  return guarded([&] {
    const auto& layers = given(balanced, "balanced").layers;
    if (layer < 0 || layer >= static_cast<std::int64_t>(layers.size())) {
      throw fusedmoe::Error("layer", std::to_string(layer),
                            "in [0, " + std::to_string(layers.size()) + ")");
    }
    const fusedmoe_balanced::Layer& of = layers[static_cast<std::size_t>(layer)];
    fusedmoe_balanced_layer result{};
    result.placement = of.placement.c_str();
    result.before = of.before;
    result.after = of.after;
    fusedmoe::capi::write_struct(values, result, "values");
  });
}

void fusedmoe_balanced_destroy(fusedmoe_balanced* balanced) {
  delete balanced;
}
