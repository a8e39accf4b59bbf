// Layouts of scales and of 4-bit codes that kernels and checkpoints use, to and from the flat ones
// of WeightMatrix. Every pair of functions is an inverse pair; what pads is zero.
//
// Matrices are views in host memory of any strides unless said otherwise; "flat" is (rows, columns)
// or, for the stack of E experts, (E, rows, columns). Functions throw Error for shapes and dtypes
// that do not fit, before they write.
#pragma once

#include <cstdint>
#include <span>

#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// Of all layouts here: who stores one of them stores this beside it.
inline constexpr int kScaleLayoutVersion = 1;

// ------------------------------------------------------------------------------------------------
// 128 x 4 tiles of one-byte scales (MXFP4, MXFP8, NVFP4), as block-scaled tensor cores read them.
// A tile is 512 bytes; rows 32 apart lie 4 bytes apart, neighbours 16: (tiles_m, tiles_k, 32, 4, 4)
// with tiles_m = ceil(rows / 128), tiles_k = ceil(columns / 4).

/// Bytes of a tiled matrix: rows and columns rounded up to 128 and 4.
FUSEDMOE_API std::int64_t tiled_scales_bytes(std::int64_t rows, std::int64_t columns);
/// Where scale (row, column) of a matrix with that many columns lies.
FUSEDMOE_API std::int64_t tiled_scale_offset(std::int64_t row, std::int64_t column,
                                             std::int64_t columns);

/// flat (rows, columns) or (E, rows, columns), one byte each -> tiled, contiguous (tiles_m,
/// tiles_k, 32, 4, 4) or (E, ...) of the same dtype.
FUSEDMOE_API void tile_scales(const TensorView& flat, const TensorView& tiled);
FUSEDMOE_API void untile_scales(const TensorView& tiled, const TensorView& flat);
/// Shape of the tiled form of `flat`.
FUSEDMOE_API Shape tiled_scales_shape(const Shape& flat);

/// First tiled row of each expert's activations in a grouped GEMM, and the number of all of them:
/// the running sum of rows rounded up to 128. offsets has one element more than rows.
FUSEDMOE_API void tiled_row_offsets(std::span<const std::int32_t> rows,
                                    std::span<std::int64_t> offsets);

// ------------------------------------------------------------------------------------------------
// f32 scales of groups along a row, column by column for TMA: group g of row m at g *
// round_up(rows, 4) + m.

/// flat (rows, groups) f32 -> contiguous (groups, round_up(rows, 4)) f32.
FUSEDMOE_API void scales_to_columns(const TensorView& flat, const TensorView& columns);
FUSEDMOE_API void columns_to_scales(const TensorView& columns, const TensorView& flat);

/// Power-of-two scales (rows, groups), e8m0 or u8, four neighbouring groups per word, the first in
/// the low byte -> contiguous (ceil(groups / 4), round_up(rows, 4)) i32.
FUSEDMOE_API void pack_e8m0_columns(const TensorView& flat, const TensorView& columns);
FUSEDMOE_API void unpack_e8m0_columns(const TensorView& columns, const TensorView& flat);

// ------------------------------------------------------------------------------------------------
// Integer codes in words.

/// Order of the 8 nibbles of a word, from the low one up, by column: 0 to 7, or AWQ's 0, 2, 4, 6,
/// 1, 3, 5, 7. Bytes of 8-bit codes are sequential.
enum class CodeOrder { kSequential, kAwq };

/// codes (rows, columns) u8 -> words (rows, ceil(columns * width / 32)) i32; width 4 or 8 bits.
/// With transposed views: WeightMatrix and pack-quantized words lie along `in`; GPTQ's qweight is
/// (in / 8, out), the transpose of such words; AWQ's is (in, out / 8), and its and GPTQ's zero
/// points (groups, out / 8).
FUSEDMOE_API void pack_codes(const TensorView& codes, const TensorView& words, int width = 4,
                             CodeOrder order = CodeOrder::kSequential);
FUSEDMOE_API void unpack_codes(const TensorView& words, const TensorView& codes, int width = 4,
                               CodeOrder order = CodeOrder::kSequential);

/// Unsigned nibbles n (value n - 8) to two's complement ones and back, in place: n ^ 8. Contiguous
/// i32.
FUSEDMOE_API void flip_int4_sign(const TensorView& words);
/// Two's complement nibbles to W4A8's unified encoding and back, in place: 1 to 7 become 8 - v, so
/// that +v and -v share the low three bits. Contiguous i32.
FUSEDMOE_API void unify_int4(const TensorView& words);

/// W4A8's table of products: e4m3 group scales (rows, groups) -> contiguous (groups, rows, 8) e4m3,
/// scale * -8, ..., scale * -1, each rounded. The inverse reads the last of the eight.
FUSEDMOE_API void pack_w4a8_scales(const TensorView& scales, const TensorView& packed);
FUSEDMOE_API void unpack_w4a8_scales(const TensorView& packed, const TensorView& scales);

}  // namespace fusedmoe
