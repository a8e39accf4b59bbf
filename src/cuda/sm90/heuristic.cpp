#include "cuda/sm90/heuristic.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/sm90/kernel_set.h"

namespace fusedmoe::cuda::sm90 {
namespace {

/// The narrowest tiles that have room for an expert's rows. Thresholds are fitted to what `fusedmoe
/// tune` measured for 21 layers (docs/performance.md).
TileShape choose_tile(const MlpShape& shape, const Load& load, const ConfigList& configs) {
  const WeightFormat& format = *shape.format;
  const KernelSet& set = kernel_set(format);
  const TileShape &with_k_groups = set.tiles[0], &with_epilogue_warpgroup = set.tiles[1];
  const std::int64_t k_blocks = ceil_div(shape.intermediate, 64);  // as 16-bit formats have them
  const auto k = static_cast<double>(k_blocks);
  // Up to how many waves of larger tiles the small tiles pay, and which pay beyond:
  //             limit             beyond it
  //   decoded   1 + k / 20        tiles with an epilogue warpgroup, but no K groups: decoding costs
  //                               the same whatever a tile's rows
  //   as is     k k / 15, least 1 none of either: a short K is over too soon for another warpgroup
  //   groups    1                 as decoded: tiles with K groups quantize later
  //   E4M3      3 + k / 10        as decoded
  const double large = waves(shape, load, load.rows, gate_and_up(shape), with_epilogue_warpgroup);
  const bool few = large <= (shape.stores_groups ? 1
                             : format.decodes    ? 1 + k / 20
                             : format.fp8_rows   ? 3 + k / 10
                                                 : std::max(1.0, k * k / 15));
  const bool epilogue_warpgroup_beyond = format.fp8_rows || format.decodes;
  const auto room = [&](const TileShape& tile) {
    const double tokens = tile.max_tokens;
    if (!tile.has_epilogue_warpgroup()) {
      return shape.stores_groups && !tile.has_whole_groups() ? 0.0 : tokens;
    }
    if (!few && (tile == with_k_groups || !epilogue_warpgroup_beyond)) return 0.0;
    // An epilogue warpgroup takes longer over many rows than a short K takes to multiply.
    return std::min(
        {tokens, 1.5 * k, set.mma_sync_tokens > 0 ? double(set.mma_sync_tokens) : tokens});
  };
  // Blocks of a cluster wait for each other at the end of each tile. With tokens as rows that pays
  // where K is long.
  constexpr int kShort = 8, kLong = 64;
  TileShape chosen;
  for (const KernelConfig& config : configs) {
    const int least = config.tile.tokens_are_rows ? kLong : kShort;
    if (config.tile.cluster > 1 && k_blocks < least) continue;
    chosen = config.tile;
    if (room(chosen) >= load.rows + load.spread) break;
  }
  return chosen;
}

/// Where tiles do not occupy all multiprocessors for long, the configuration of the fewest whole
/// waves, by what a tile costs. Constants fitted as above.
KernelConfig fill_waves(const MlpShape& shape, const Load& load, const ConfigList& configs) {
  // The unit is one wgmma column of one packed block. A block costs the columns of its tile and 60
  // more, each value that the combine adds 1/64.
  constexpr double kColumnsOfWeights = 60, kColumnsOfSum = 1.0 / 64;
  const double most_rows = load.rows + load.spread / 2;
  const auto all_rows = static_cast<double>(likely_tokens(shape) * shape.topk);
  KernelConfig best = *configs.begin();
  double least = std::numeric_limits<double>::infinity();
  for (const KernelConfig& config : configs) {
    if (!is_long_enough(shape, config.splits)) continue;
    const TileShape& tile = config.tile;
    const double columns = std::ceil(load.rows / std::ceil(most_rows / tile.max_tokens) / 16) * 16;
    const auto k_blocks = [&](std::int64_t width, std::int64_t k, int splits) {
      return std::ceil(splits * waves(shape, load, most_rows, width, tile)) *
             static_cast<double>(ceil_div(k_blocks_of(shape, k), splits));
    };
    const double cost =
        (k_blocks(gate_and_up(shape), shape.hidden, 1) +
         k_blocks(shape.hidden, shape.intermediate, config.splits)) *
            tile.tile_row_blocks() * (kColumnsOfWeights + columns) +
        kColumnsOfSum * config.splits * all_rows * static_cast<double>(shape.hidden);
    if (cost < least) {
      least = cost;
      best = config;
    }
  }
  return best;
}

}  // namespace

KernelConfig choose_tiles(const MlpShape& shape) {
  const Load load = expected_load(shape);
  const ConfigList configs = valid_tiles(shape);
  const TileShape tile = choose_tile(shape, load, configs);
  constexpr double kFew = 0.6;  // fitted as the others
  const auto waves_of_gemm1 = [&](const TileShape& of) {
    return waves(shape, load, load.rows, gate_and_up(shape), of);
  };
  if (waves_of_gemm1(tile) <= kFew || waves_of_gemm1(kernel_set(*shape.format).tiles[0]) <= 1) {
    return fill_waves(shape, load, configs);
  }
  // Few tiles of GEMM 2 end late: one and a half for each multiprocessor where they are bound by
  // their weights, one where there are more rows to add.
  constexpr int kFewTokens = 64;
  const double wanted = tile.max_tokens <= kFewTokens ? 1.5 : 1;
  KernelConfig chosen;
  for (const KernelConfig& config : configs) {
    if (config.tile != tile || !is_long_enough(shape, config.splits)) continue;
    chosen = config;
    if (config.splits * waves(shape, load, load.rows, shape.hidden, tile) >= wanted) break;
  }
  return chosen;
}

}  // namespace fusedmoe::cuda::sm90
