#include "cuda/mlp/kernel_family.h"

#include <algorithm>

#include "cuda/formats/weight_formats.h"

namespace fusedmoe::cuda {

std::vector<KernelConfig> KernelFamily::list_configs() const {
  std::vector<KernelConfig> list{kOneToken};
  for (const WeightFormat& format : weight_formats()) {
    for (const TileShape& tile : tiles(format)) {
      for (const int splits : kSplits) {
        for (const bool rows_f32 : {false, true}) {
          const KernelConfig config{tile, splits, rows_f32};
          if (std::find(list.begin(), list.end(), config) == list.end()) list.push_back(config);
        }
      }
    }
  }
  return list;
}

std::span<const KernelConfig> KernelFamily::configs() const {
  // Never destroyed: threads may outlive static objects.
  std::call_once(listed_, [&] { configs_ = new std::vector<KernelConfig>(list_configs()); });
  return *configs_;
}

int find_config(const KernelFamily& family, std::string_view name) {
  const auto configs = family.configs();
  const auto found = std::find_if(configs.begin(), configs.end(), [&](const KernelConfig& config) {
    return to_string(config) == name;
  });
  return found == configs.end() ? -1 : static_cast<int>(found - configs.begin());
}

}  // namespace fusedmoe::cuda
