// The tile shapes that are compiled of mma.sync. Each takes at most 80 KiB of shared memory, so
// that one thread block fits a multiprocessor with 100 KiB and two fit one with 164: no tile
// depends on the GPU, only how many of its stages a launch takes.
#pragma once

#include <cstdint>
#include <span>

#include "cuda/formats/weight_format.h"
#include "cuda/mlp/tile_shape.h"

namespace fusedmoe::cuda::sm80 {

// A warp has 16 rows of each of two row blocks, so that it reads token rows once for both. The
// last tile of some lists has two row groups instead, of one row block each, and so eight warps. It
// is for GPUs whose multiprocessors have shared memory for one thread block only.

/// Of weights that are multiplied as they are, with 16 bits or INT8, from few tokens to many.
inline constexpr TileShape kTilesAsIs[] = {
    {16, 1, 2, 1, 1, false, 3}, {16, 1, 1, 2, 1, false, 4},  {32, 1, 1, 2, 1, false, 3},
    {64, 1, 1, 2, 1, false, 3}, {128, 1, 1, 2, 1, false, 2}, {128, 2, 1, 1, 1, false, 2},
};

/// Of packed blocks of 4 KB for 128 bytes of a token row: 8-bit weights that are decoded to 16
/// bits, and 4-bit weights that are decoded to FP8 and multiplied as it is.
inline constexpr TileShape kTiles8Bit[] = {
    {16, 1, 2, 1, 1, false, 4},
    {16, 1, 1, 2, 1, false, 5},
    {32, 1, 1, 2, 1, false, 5},
    {64, 1, 1, 2, 1, false, 4},
};

/// Of FP8 weights and of such that are decoded to FP8, where FP8 is multiplied as f16: token rows
/// are in f16, 256 bytes of a K block.
inline constexpr TileShape kTilesFp8[] = {
    {16, 1, 2, 1, 1, false, 2}, {16, 1, 1, 2, 1, false, 3}, {32, 1, 1, 2, 1, false, 3},
    {64, 1, 1, 2, 1, false, 2}, {64, 2, 1, 1, 1, false, 2},
};
inline constexpr TileShape kTilesDecodedFp8[] = {
    {16, 1, 2, 1, 1, false, 3},
    {16, 1, 1, 2, 1, false, 5},
    {32, 1, 1, 2, 1, false, 4},
    {64, 1, 1, 2, 1, false, 2},
};

/// Of 4-bit weights, which are decoded. Decoders leave no registers for more tokens.
inline constexpr TileShape kTiles4Bit[] = {
    {16, 1, 4, 1, 1, false, 3},
    {16, 1, 1, 2, 1, false, 4, 2},
    {32, 1, 1, 2, 1, false, 4, 2},
    {64, 1, 1, 2, 1, false, 4},
};

/// What the tensor cores multiply for FP8 numbers.
enum class Fp8 : std::uint8_t {
  kAsF16,   ///< f16, which holds them exactly: all GPUs can
  kNative,  ///< themselves
};

/// Which kernels there are of a weight format.
struct KernelSet {
  const WeightFormat* format = nullptr;
  /// In order of their tokens. The first has K groups, all after it have none.
  std::span<const TileShape> tiles;
  Fp8 fp8 = Fp8::kAsF16;

  /// Whether tiles of this shape can quantize rows between the GEMMs: FusedMlpParams::pass. With
  /// more tokens a launch between the GEMMs is up to 10 % faster (H200), as more warps read rows.
  constexpr bool has_row_pass(const TileShape& tile) const {
    return format && format->coded_rows() && tile.max_tokens <= 32;
  }
  constexpr bool fp8_as_f16() const { return format->fp8_rows && fp8 == Fp8::kAsF16; }
  /// Whether the tensor cores multiply FP8 itself. They add the products less exactly than fp32, so
  /// each K block is summed up apart.
  constexpr bool is_native_fp8() const { return format->fp8_rows && fp8 == Fp8::kNative; }
};

/// Of a token row in a K block.
constexpr int row_bytes(const KernelSet& set) {
  return set.fp8_as_f16() ? 2 * kSwizzleBytes : kSwizzleBytes;
}
/// Scales of a K block: of its tokens, then of slices of 8 weight rows.
constexpr int num_scales(const TileShape& tile, const WeightFormat& format) {
  return format.k_scales ? tile.max_tokens + tile.tile_row_blocks() * (kBlockRows / 8) : 0;
}
/// Of shared memory: token rows, packed blocks and scales, all of neighbouring K blocks for each K
/// group.
constexpr int stage_bytes(const TileShape& tile, const KernelSet& set) {
  const int of_k_block = tile.max_tokens * row_bytes(set) +
                         tile.tile_row_blocks() * set.format->block.bytes +
                         num_scales(tile, *set.format) * int{sizeof(float)};
  return static_cast<int>(ceil_div(tile.k_groups * tile.depth * of_k_block, kSwizzleBytes) *
                          kSwizzleBytes);
}

/// Thread blocks of a multiprocessor, by the registers that a thread needs.
constexpr int most_blocks(const TileShape& tile, const KernelSet& set) {
  const int accumulators = (set.is_native_fp8() ? 2 : 1) * tile.row_blocks * tile.max_tokens / 2;
  const int threads = set.fp8_as_f16() || accumulators >= 128 ? 256
                      : accumulators < 64                     ? 512
                      : set.format->int8_rows                 ? 256
                                                              : 384;
  const int of_block = 128 * tile.warpgroups();
  return threads > of_block ? threads / of_block : 1;
}

/// Stages of a launch's ring, where `beside` bytes of shared memory lie before it: those of the
/// tile. Fewer where a multiprocessor then has room for two thread blocks and not for one alone,
/// which would leave each scheduler one warp.
constexpr int ring_stages(const TileShape& tile, const KernelSet& set, std::int64_t beside,
                          std::int64_t multiprocessor_shared_bytes) {
  constexpr std::int64_t kReserved = 1 << 10;  // of each block
  const std::int64_t room = multiprocessor_shared_bytes / 2 - kReserved - beside;
  const std::int64_t stages = room / stage_bytes(tile, set);
  return most_blocks(tile, set) >= 2 && stages >= 2 && stages < tile.stages
             ? static_cast<int>(stages)
             : tile.stages;
}

}  // namespace fusedmoe::cuda::sm80
