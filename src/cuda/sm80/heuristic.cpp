#include "cuda/sm80/heuristic.h"

#include <algorithm>

#include "cuda/sm80/kernel_set.h"

namespace fusedmoe::cuda::sm80 {
namespace {

/// Thread blocks of a tile that run on a multiprocessor at the same time.
std::int64_t resident_blocks(const MlpShape& shape, const KernelSet& set, const TileShape& tile) {
  constexpr std::int64_t kBeside = 6 << 10;  // about: rows on their way out, tables, counts
  const int stages = ring_stages(tile, set, kBeside, shape.multiprocessor_shared_bytes);
  const std::int64_t bytes = std::int64_t{stages} * stage_bytes(tile, set) + kBeside;
  return std::min<std::int64_t>(shape.multiprocessor_shared_bytes / bytes, most_blocks(tile, set));
}

}  // namespace

KernelConfig choose_tiles(const MlpShape& shape, const KernelSet& set) {
  const Load load = expected_load(shape);
  const ConfigList configs = valid_tiles(shape);
  // The narrowest tiles that have room for an expert's rows. K groups pay only where there are few
  // tiles. Wider tiles of decoded weights do not pay where they leave a multiprocessor fewer
  // blocks, up to three: 7 to 13 % slower with two than with three (H200, MXFP4, 2048 and 8192
  // tokens of gpt-oss-120b). Where narrow tiles have no more blocks, wide ones decode once for more
  // tokens.
  constexpr double kFew = 1;
  constexpr std::int64_t kEnoughBlocks = 3;
  TileShape tile = configs.begin()->tile;
  for (const KernelConfig& config : configs) {
    const bool are_few = waves(shape, load, load.rows, gate_and_up(shape), config.tile) <= kFew;
    if (config.tile.row_groups > 1 || (config.tile.k_groups > 1 && !are_few)) continue;
    const std::int64_t least = std::min(resident_blocks(shape, set, tile), kEnoughBlocks);
    const bool wider = config.tile.max_tokens > tile.max_tokens;
    if (shape.format->decodes && wider && resident_blocks(shape, set, config.tile) < least) break;
    tile = config.tile;
    if (tile.max_tokens >= load.rows + load.spread) break;
  }
  // Four warps alone on a multiprocessor find nothing to do while they wait. Of the widest tiles
  // there are such of eight: they take 2 to 3 % less time for bf16, 11 to 17 % less for INT8 and
  // FP8 (H200 with 100 KiB, qwen3-30b-a3b).
  if (resident_blocks(shape, set, tile) == 1) {
    for (const KernelConfig& config : configs) {
      const bool is_as_wide = config.tile.max_tokens == tile.max_tokens;
      if (is_as_wide && config.tile.row_groups > 1) tile = config.tile;
    }
  }
  // Few tiles of GEMM 2 end late: K is split until there are one and a half for each
  // multiprocessor.
  constexpr double kWanted = 1.5;
  KernelConfig chosen;
  for (const KernelConfig& config : configs) {
    if (config.tile != tile || !is_long_enough(shape, config.splits)) continue;
    chosen = config;
    if (config.splits * waves(shape, load, load.rows, shape.hidden, tile) >= kWanted) break;
  }
  return chosen;
}

}  // namespace fusedmoe::cuda::sm80
