#include "cuda/sm80/heuristic.h"

#include <algorithm>
#include <limits>

namespace fusedmoe::cuda::sm80 {

KernelConfig choose_tiles(const MlpShape& shape) {
  const Load load = expected_load(shape);
  const ConfigList configs = valid_tiles(shape);
  // The narrowest tiles that have room for an expert's rows. K groups pay only where there are few
  // tiles. Wider tiles of decoded weights, of which a multiprocessor has two instead of four, are 7
  // to 13 % slower: measured on an H200 with MXFP4, 2048 and 8192 tokens of gpt-oss-120b.
  constexpr double kFew = 1;
  const int most_tokens = shape.format->decodes ? 32 : std::numeric_limits<int>::max();
  TileShape tile = configs.begin()->tile;
  for (const KernelConfig& config : configs) {
    const bool are_few = waves(shape, load, load.rows, gate_and_up(shape), config.tile) <= kFew;
    if (config.tile.k_groups > 1 && !are_few) continue;
    tile = config.tile;
    if (tile.max_tokens >= std::min<double>(load.rows + load.spread, most_tokens)) break;
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
