// Which compiled kernel runs a configuration.
#include "cuda/gemm/grouped_gemm.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.h"
#include "cuda/gemm/instances/instances.h"

namespace fusedmoe::cuda {
namespace {

using Launch = void (*)(const GroupedGemm&, void*);
constexpr std::size_t kNumConfigs = std::size(kTileConfigs);

template <typename Weights, std::size_t... kConfig>
constexpr std::array<Launch, kNumConfigs> make_launches(std::index_sequence<kConfig...>) {
  return {&launch_instance<Weights, static_cast<int>(kConfig)>...};
}

template <typename Weights>
constexpr auto kLaunches = make_launches<Weights>(std::make_index_sequence<kNumConfigs>());

}  // namespace

std::string to_string(const TileConfig& config) {
  return core::format("{}x{}k{}c{}", config.tile_row_blocks() * kRecordRows, config.max_tokens,
                      config.k_groups, config.cluster);
}

std::span<const TileConfig> tile_configs() {
  return kTileConfigs;
}

std::int64_t work_counters(const TileConfig& config, std::int64_t rows, std::int64_t num_experts) {
  return 1 + ceil_div(rows, config.max_tokens) + num_experts;
}

void grouped_gemm(const GroupedGemm& problem, WeightFormat format, const TileConfig& config,
                  const Stream& stream) {
  const auto* found = std::find(std::begin(kTileConfigs), std::end(kTileConfigs), config);
  FUSEDMOE_CHECK(found != std::end(kTileConfigs), "tile config", to_string(config),
                 "one that is compiled");
  FUSEDMOE_CHECK(
      !(problem.batch_invariant && is_decoded(format) && config.has_epilogue_warpgroup()),
      "tile config", to_string(config), "one of more than 32 tokens: batch invariance");
  const auto index = static_cast<std::size_t>(found - std::begin(kTileConfigs));
  switch (format) {
    case WeightFormat::kBF16:
      return kLaunches<Bf16Weights>[index](problem, stream.handle);
    case WeightFormat::kF16:
      return kLaunches<F16Weights>[index](problem, stream.handle);
    case WeightFormat::kMXFP4:
      return kLaunches<Mxfp4Weights>[index](problem, stream.handle);
  }
}

}  // namespace fusedmoe::cuda
