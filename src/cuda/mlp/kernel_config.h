// How one forward runs. Needs no CUDA.
#pragma once

#include <string>

#include "cuda/mlp/tile_shape.h"

namespace fusedmoe::cuda {

struct KernelConfig {
  TileShape tile;
  int splits = 1;         ///< of GEMM 2's K
  bool rows_f32 = false;  ///< GEMM 2 leaves its rows to the combine in f32, else in 16 bits
  /// The kernel of one token instead (one_token/), without tiles and combine.
  bool one_token = false;
  constexpr bool operator==(const KernelConfig&) const = default;
};

/// What the kernel of one token is as a configuration.
inline constexpr KernelConfig kOneToken{{16, 1, 4, 1}, 1, false, true};

/// "64x16k4c1 splits 2 f32", "one token"
std::string to_string(const KernelConfig& config);

inline constexpr int kSplits[] = {1, 2, 4};
/// Most tiles of a format.
inline constexpr int kMaxTiles = 8;

}  // namespace fusedmoe::cuda
