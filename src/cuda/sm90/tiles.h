// The tile shapes that are compiled for Hopper.
#pragma once

#include "cuda/mlp/tile_shape.h"

namespace fusedmoe::cuda::sm90 {

/// The tiles of operands with 16-bit activations, from few tokens to many.
inline constexpr TileShape kTiles16Bit[] = {
    {16, 1, 4, 1, 1},  {32, 4, 1, 1, 1},  {64, 4, 1, 1, 1},  {96, 4, 1, 1, 1},
    {144, 2, 1, 2, 1}, {144, 2, 1, 2, 2}, {288, 2, 1, 1, 2},
};

/// Those of decoded weights, which leave no registers for the others' tiles.
inline constexpr TileShape kTilesDecoded[] = {
    {16, 1, 4, 1, 1}, {32, 4, 1, 1, 1}, {64, 4, 1, 1, 1}, {144, 2, 1, 1, 2}, {288, 2, 1, 1, 2},
};

/// The tiles of FP8. Each K block is summed up in temporary accumulators and then added to the
/// others; so large tiles leave room for both. With tokens as rows a thread has the accumulators of
/// four tokens, so it needs four token scales for a K block.
inline constexpr TileShape kTilesFp8[] = {
    {16, 1, 4, 1, 1},        {32, 4, 1, 1, 1},        {64, 2, 1, 2, 1},
    {128, 2, 1, 2, 1, true}, {128, 2, 1, 2, 2, true},
};

/// Without scales of K blocks. No groups are quantized in their epilogue, for which two warpgroups
/// would have to exchange largest magnitudes. So tiles of 64 tokens can have four warpgroups.
inline constexpr TileShape kTilesFp8Rows[] = {
    {16, 1, 4, 1, 1}, {32, 4, 1, 1, 1},        {64, 4, 1, 1, 1},
    {96, 2, 1, 1, 2}, {128, 2, 1, 2, 1, true}, {128, 2, 1, 2, 2, true},
};

/// Of f16 rows, which tiles with tokens as rows cannot weight.
inline constexpr TileShape kTilesFp8F16[] = {
    {16, 1, 4, 1, 1},
    {32, 4, 1, 1, 1},
    {64, 2, 1, 2, 1},
    {96, 2, 1, 1, 2},
};

/// FP8 tiles of decoded weights. wgmma takes only its rows from registers, so tokens cannot be
/// them. Without scales of K blocks both sets of accumulators have room for 192 tokens.
inline constexpr TileShape kTilesDecodedFp8[] = {
    {16, 1, 4, 1, 1}, {32, 4, 1, 1, 1}, {64, 4, 1, 1, 1}, {96, 2, 1, 1, 2}, {192, 2, 1, 1, 2},
};

}  // namespace fusedmoe::cuda::sm90
