#include "cuda/mlp/kernel_choice.h"

#include <algorithm>
#include <cmath>

namespace fusedmoe::cuda {
namespace {

/// Rows in f32 cost little while they stay in the L2: up to so many bytes, measured on an H200, and
/// up to a third of a smaller one.
std::int64_t most_bytes_f32(const MlpShape& shape) {
  return std::min(std::int64_t{16} << 20, shape.l2_bytes / 3);
}

}  // namespace

std::int64_t likely_tokens(const MlpShape& shape) {
  if (shape.expected_tokens > 0) return std::min(shape.expected_tokens, shape.num_tokens);
  if (shape.batched || shape.num_experts <= shape.num_local_experts) return shape.num_tokens;
  return ceil_div(shape.num_tokens * shape.num_local_experts, shape.num_experts);
}

std::int64_t max_tokens_f32(const MlpShape& shape) {
  if (shape.batched || shape.unfused || shape.batch_invariant) return 0;
  return most_bytes_f32(shape) / std::max<std::int64_t>(1, shape.topk * shape.hidden * 4);
}

bool valid(const MlpShape& shape, const KernelConfig& config) {
  if (config.one_token) {
    return shape.has_one_token && shape.num_tokens == 1 && config == kOneToken;
  }
  const auto tiles = shape.family->tiles(*shape.format);
  return std::find(tiles.begin(), tiles.end(), config.tile) != tiles.end() &&
         std::find(std::begin(kSplits), std::end(kSplits), config.splits) != std::end(kSplits) &&
         // A split has a block of K.
         config.splits <= std::max<std::int64_t>(1, k_blocks_of(shape, shape.intermediate)) &&
         (!shape.batch_invariant || shape.family->keeps_order(*shape.format, config.tile)) &&
         // Rows that are an output, or that hooks see, have 16 bits.
         (!config.rows_f32 || shape.num_tokens <= max_tokens_f32(shape)) &&
         (config.rows_f32 || config.splits == 1);
}

ConfigList valid_tiles(const MlpShape& shape) {
  ConfigList configs;
  const bool rows_f32 = shape.num_tokens <= max_tokens_f32(shape);
  for (const TileShape& tile : shape.family->tiles(*shape.format)) {
    for (const int splits : kSplits) {
      const KernelConfig config{tile, splits, rows_f32};
      if (valid(shape, config)) configs.push_back(config);
    }
  }
  return configs;
}

ConfigList valid_configs(const MlpShape& shape) {
  ConfigList configs;
  if (valid(shape, kOneToken)) configs.push_back(kOneToken);
  for (const KernelConfig& config : valid_tiles(shape)) configs.push_back(config);
  return configs;
}

KernelConfig largest_config(const MlpShape& shape) {
  static_assert(std::is_sorted(std::begin(kSplits), std::end(kSplits)));
  const bool rows_f32 = shape.num_tokens <= max_tokens_f32(shape);
  return {shape.family->tiles(*shape.format)[0], rows_f32 ? *std::rbegin(kSplits) : 1, rows_f32};
}

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

}  // namespace fusedmoe::cuda
