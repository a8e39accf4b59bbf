#include "cuda/sm90/heuristic.h"

#include "core/format.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "cuda/one_token/one_token.h"

namespace fusedmoe::cuda {
namespace {

/// What a routing at random makes of a shape.
struct Load {
  double hit_experts;  // that have rows
  double rows;         // of each of them, on average
  double spread;       // of their rows: standard deviation
};

/// Every one of the likely tokens draws topk of the local experts. In the batched format anything
/// up to the capacity is possible: a quarter of it unless the caller knows.
Load expected_load(const MlpShape& shape) {
  const auto tokens = static_cast<double>(likely_tokens(shape));
  const auto experts = static_cast<double>(shape.num_local_experts);
  if (shape.batched) {
    const double rows = std::max(1.0, shape.expected_tokens > 0 ? tokens : tokens / 4);
    return {experts, rows, std::sqrt(rows)};
  }
  const auto topk = static_cast<double>(shape.topk);
  const double share = std::min(1.0, topk / experts);
  const double hit = std::max(1.0, experts * (1 - std::pow(1 - share, tokens)));
  const double rows = std::max(1.0, tokens * topk / hit);
  return {hit, rows, std::sqrt(rows * (1 - share))};
}

/// How many times the tiles of a GEMM of so many outputs, `rows` to an expert, occupy all
/// multiprocessors.
double waves(const MlpShape& shape, const Load& load, double rows, std::int64_t width,
             const TileShape& tile) {
  const std::int64_t cluster_rows = tile.tile_row_blocks() * tile.cluster * kBlockRows;
  return load.hit_experts * std::ceil(rows / tile.max_tokens) *
         static_cast<double>(ceil_div(width, cluster_rows)) * tile.cluster / shape.multiprocessors;
}

std::int64_t k_blocks_of(const MlpShape& shape, std::int64_t k) {
  return ceil_div(k, shape.format->block.k);
}

std::int64_t gate_and_up(const MlpShape& shape) {
  return 2 * shape.intermediate;  // most weights are gated
}

/// Whether each split has enough of K to be worth it.
bool is_long_enough(const MlpShape& shape, int splits) {
  constexpr int kLeastBlocks = 8;
  return splits == 1 || splits * kLeastBlocks <= k_blocks_of(shape, shape.intermediate);
}

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
  //   groups    0.8               as decoded: tiles with K groups take another launch
  //   E4M3      3 + k / 10        as decoded
  const double large = waves(shape, load, load.rows, gate_and_up(shape), with_epilogue_warpgroup);
  const bool few = large <= (shape.stores_groups ? 0.8
                             : format.decodes    ? 1 + k / 20
                             : format.fp8_rows   ? 3 + k / 10
                                                 : std::max(1.0, k * k / 15));
  const bool epilogue_warpgroup_beyond = format.fp8_rows || format.decodes;
  const auto room = [&](const TileShape& tile) {
    const double tokens = tile.max_tokens;
    if (!tile.has_epilogue_warpgroup()) {
      const bool has_groups = tile.has_whole_groups() || tile.tokens_are_rows();
      return shape.stores_groups && !has_groups ? 0.0 : tokens;
    }
    if (!few && (tile == with_k_groups || !epilogue_warpgroup_beyond)) return 0.0;
    // An epilogue warpgroup takes longer over many rows than a short K takes to multiply.
    return std::min(
        {tokens, 1.5 * k, set.mma_sync_tokens > 0 ? double(set.mma_sync_tokens) : tokens});
  };
  constexpr int kShort = 8;
  TileShape chosen;
  for (const KernelConfig& config : configs) {
    // Blocks of a cluster wait for each other at the end of each tile.
    if (config.tile.cluster > 1 && k_blocks < kShort) continue;
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

/// The kernel of one token saves launches; where more weights are read, tiles read them faster. It
/// also loses where the slices of GEMM 2 leave multiprocessors without work. Limits as measured
/// (docs/performance-log.md).
bool prefers_one_token(const MlpShape& shape) {
  if (!valid(shape, kOneToken)) return false;
  const WeightFormat& format = *shape.format;
  constexpr std::int64_t kMiB = 1 << 20;
  const std::int64_t most = format.decodes ? 70 * kMiB : format.fp8_rows ? 150 * kMiB : 80 * kMiB;
  const BlockGrid first = format.grid(shape.intermediate, shape.hidden, shape.gated);
  const BlockGrid second = format.grid(shape.hidden, shape.intermediate, false);
  const std::int64_t bytes = shape.topk * (first.count() + second.count()) * format.block.bytes;
  constexpr double kLeastBusy = 0.75;
  const std::int64_t slices = slices_of(shape.hidden, false);
  const auto busy =
      static_cast<double>(slices) /
      static_cast<double>(ceil_div(slices, shape.multiprocessors) * shape.multiprocessors);
  return bytes <= most && busy >= kLeastBusy;
}

/// Rows in f32 up to so many bytes stay in the L2, where they cost little.
constexpr std::int64_t kBytesF32 = std::int64_t{16} << 20;

/// The valid configurations that are tiles.
void add_tile_configs(const MlpShape& shape, ConfigList& configs) {
  const bool rows_f32 = shape.num_tokens <= max_tokens_f32(shape);
  for (const TileShape& tile : kernel_set(*shape.format).tiles) {
    for (const int splits : kSplits) {
      const KernelConfig config{tile, splits, rows_f32};
      if (valid(shape, config)) configs.push_back(config);
    }
  }
}

}  // namespace

std::string to_string(const KernelConfig& config) {
  if (config.one_token) return "one token";
  return core::format("{} splits {} {}", to_string(config.tile), config.splits,
                      config.rows_f32 ? "f32" : "bf16");
}

std::span<const KernelConfig> all_configs() {
  static const auto& configs = *new std::vector<KernelConfig>([] {  // threads may outlive it
    std::vector<KernelConfig> list{kOneToken};
    for (const WeightFormat& format : weight_formats()) {
      for (const TileShape& tile : kernel_set(format).tiles) {
        for (const int splits : kSplits) {
          for (const bool rows_f32 : {false, true}) {
            const KernelConfig config{tile, splits, rows_f32};
            if (std::find(list.begin(), list.end(), config) == list.end()) list.push_back(config);
          }
        }
      }
    }
    return list;
  }());
  return configs;
}

int find_config(std::string_view name) {
  const auto configs = all_configs();
  const auto found = std::find_if(configs.begin(), configs.end(), [&](const KernelConfig& config) {
    return to_string(config) == name;
  });
  return found == configs.end() ? -1 : static_cast<int>(found - configs.begin());
}

std::int64_t likely_tokens(const MlpShape& shape) {
  if (shape.expected_tokens > 0) return std::min(shape.expected_tokens, shape.num_tokens);
  if (shape.batched || shape.num_experts <= shape.num_local_experts) return shape.num_tokens;
  return ceil_div(shape.num_tokens * shape.num_local_experts, shape.num_experts);
}

std::int64_t max_tokens_f32(const MlpShape& shape) {
  if (shape.batched || shape.unfused || shape.batch_invariant) return 0;
  return kBytesF32 / std::max<std::int64_t>(1, shape.topk * shape.hidden * 4);
}

bool valid(const MlpShape& shape, const KernelConfig& config) {
  if (config.one_token) {
    return shape.has_one_token && shape.num_tokens == 1 && config == kOneToken;
  }
  const auto tiles = kernel_set(*shape.format).tiles;
  return std::find(tiles.begin(), tiles.end(), config.tile) != tiles.end() &&
         std::find(std::begin(kSplits), std::end(kSplits), config.splits) != std::end(kSplits) &&
         // A split has a block of K.
         config.splits <= std::max<std::int64_t>(1, k_blocks_of(shape, shape.intermediate)) &&
         (!shape.batch_invariant || kernel_set(*shape.format).keeps_order(config.tile)) &&
         // Rows that are an output, or that hooks see, have 16 bits.
         (!config.rows_f32 || shape.num_tokens <= max_tokens_f32(shape)) &&
         (config.rows_f32 || config.splits == 1);
}

ConfigList valid_configs(const MlpShape& shape) {
  ConfigList configs;
  if (valid(shape, kOneToken)) configs.push_back(kOneToken);
  add_tile_configs(shape, configs);
  return configs;
}

KernelConfig largest_config(const MlpShape& shape) {
  static_assert(std::is_sorted(std::begin(kSplits), std::end(kSplits)));
  const bool rows_f32 = shape.num_tokens <= max_tokens_f32(shape);
  return {kernel_set(*shape.format).tiles[0], rows_f32 ? *std::rbegin(kSplits) : 1, rows_f32};
}

KernelConfig choose_config(const MlpShape& shape) {
  if (prefers_one_token(shape)) return kOneToken;
  const Load load = expected_load(shape);
  ConfigList configs;
  add_tile_configs(shape, configs);
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
  // A multiprocessor has as many tiles at a time as teams, and each takes so much longer.
  constexpr int kFewTokens = 64;
  const double wanted = tile.max_tokens <= kFewTokens ? 1.5 : std::max(1, tile.teams);
  KernelConfig chosen;
  for (const KernelConfig& config : configs) {
    if (config.tile != tile || !is_long_enough(shape, config.splits)) continue;
    chosen = config;
    if (config.splits * waves(shape, load, load.rows, shape.hidden, tile) >= wanted) break;
  }
  return chosen;
}

}  // namespace fusedmoe::cuda
