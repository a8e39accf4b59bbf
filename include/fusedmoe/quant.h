// Number formats as data, and the conversions between them.
//
// A QuantKey is the number format of one operand of a GEMM. A QuantScheme is the pair of them: the
// weights' and the activations'. A new scheme is a new value, never a new class.
//
// Operands are matrices whose rows the GEMM sums along: weights (out, in), activations (tokens,
// in). A matrix is cut into blocks of GroupShape elements, from its first element on; each block
// has one scale. Formulas: docs/number-formats.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

/// Extent of one scale, in rows and columns of the operand; -1 is the whole extent. (-1, -1) per
/// tensor, (1, -1) per output channel or token, (1, 32) per row and group of 32, (128, 128) block.
struct GroupShape {
  std::int64_t rows = -1;
  std::int64_t cols = -1;
  bool operator==(const GroupShape&) const = default;
};

/// How the E8M0 scale of an MX block follows from a = amax of its elements; m is the largest
/// element value (6 for E2M1, 448 for E4M3) and 2^p its power of two (4, 256).
enum class MxScaleRule {
  kOcp,    ///< 2^floor(log2 a) / 2^p, as OCP MX 1.0 has it; may clip
  kEven,   ///< the same with a rounded to one more mantissa bit than elements have (vLLM, Quark)
  kCeil,   ///< 2^ceil(log2(a / m)); never clips (triton_kernels' default, and all MXFP8)
  kFloor,  ///< 2^floor(log2(a / m)); clips often (vLLM's first MXFP4 kernels)
};
/// "ocp", "even", "ceil", "floor".
FUSEDMOE_API std::string_view name(MxScaleRule rule);

/// One operand's number format.
struct QuantKey {
  DType value = DType::kBF16;    ///< element type
  std::optional<DType> scale{};  ///< type of the scales; none when not quantized
  GroupShape group{};            ///< of one scale; meaningful with a scale
  /// Second-level scale (NVFP4: f32; W4A8: f32 per channel; llama.cpp's blocks: f16 per 256 or 32).
  std::optional<DType> global_scale{};
  GroupShape global_group{};                   ///< of one second-level scale
  bool dynamic = false;                        ///< scale computed from the data at run time
  bool symmetric = true;                       ///< false: has zero points
  MxScaleRule scale_rule = MxScaleRule::kOcp;  ///< of dynamic E8M0 scales per group of 32
  /// Of dynamic int8: scale amax / 127.5 and codes down to -128 (compressed-tensors); false: amax /
  /// 127 and codes down to -127 (vLLM, SGLang).
  bool full_range = false;

  bool quantized() const { return scale.has_value(); }
  bool operator==(const QuantKey&) const = default;
};

/// The number formats there are. "Group" counts elements along a row.
namespace keys {
FUSEDMOE_API QuantKey e4m3_tensor(bool dynamic = false);      ///< f32 scale per tensor
FUSEDMOE_API QuantKey e4m3_row(bool dynamic = false);         ///< f32 scale per channel or token
FUSEDMOE_API QuantKey e4m3_block();                           ///< f32 scale per 128 x 128; weights
FUSEDMOE_API QuantKey e4m3_group(bool power_of_two = false);  ///< 1 x 128 dynamic; activations
FUSEDMOE_API QuantKey mxfp4(bool dynamic = false, MxScaleRule rule = MxScaleRule::kOcp);
FUSEDMOE_API QuantKey mxfp8(bool dynamic = false);  ///< E4M3, E8M0 per 32
FUSEDMOE_API QuantKey nvfp4(bool dynamic = false);  ///< E2M1, E4M3 per 16, f32 per tensor
/// Unsigned codes minus 8 or, if asymmetric, minus a zero point, times a scale per group; -1: one
/// per channel. The scales are of any floating dtype; the key says f32.
FUSEDMOE_API QuantKey int4(std::int64_t group, bool symmetric = true);
FUSEDMOE_API QuantKey int8(std::int64_t group, bool symmetric = true);  ///< codes minus 128
FUSEDMOE_API QuantKey int4_e4m3();  ///< W4A8: codes minus 8, E4M3 per 128, f32 per channel
FUSEDMOE_API QuantKey int8_row(bool dynamic = false);  ///< f32 scale per channel or token
FUSEDMOE_API QuantKey int8_group(std::int64_t group);  ///< dynamic, f32 per group; activations
/// Dynamic int16 for activations; the f32 scale of a group is a power of two. A bf16 value of at
/// least 1/128 of the group's largest is exact, a smaller one is off by at most 2^-15 of the
/// largest.
FUSEDMOE_API QuantKey int16_group(std::int64_t group);
// llama.cpp's blocks. Codes of 2 and 3 bits are stored in 4 bits, those of 5 and 6 bits in 8.
FUSEDMOE_API QuantKey q2_k();  ///< 2-bit codes, u8 scale and zero point per 16, two f16 per 256
FUSEDMOE_API QuantKey q3_k();  ///< 3-bit codes minus 4, kept minus 8; i8 scale per 16, f16 per 256
FUSEDMOE_API QuantKey q4_k();  ///< 4-bit codes, u8 scale and zero point per 32, two f16 per 256
FUSEDMOE_API QuantKey q5_k();  ///< the same with 5-bit codes
FUSEDMOE_API QuantKey
q6_k();  ///< 6-bit codes minus 32, kept minus 128; i8 scale per 16, f16 per 256
FUSEDMOE_API QuantKey q4_1();  ///< blocks of 32 as those of q4_k, whose scale and zero point are 1
FUSEDMOE_API QuantKey q5_1();  ///< the same with 5-bit codes
FUSEDMOE_API QuantKey iq4_nl();  ///< IQ4 codes, scale per 32 of any floating dtype
FUSEDMOE_API QuantKey iq4_xs();  ///< IQ4 codes, i8 scale per 32, f16 per 256
}  // namespace keys

/// Formats of the expert weights and of the activations between router and output. Activations
/// without a value keep the dtype of the hidden states.
struct QuantScheme {
  QuantKey weights{};
  std::optional<QuantKey> activations{};
  std::optional<QuantKey> down{};  ///< of the down matrices, where it is not that of gate and up
  const QuantKey& down_weights() const { return down ? *down : weights; }
  bool operator==(const QuantScheme&) const = default;
};

/// Whether a row's result depends on its batch: activations with one dynamic scale per tensor.
FUSEDMOE_API bool batch_dependent(const QuantScheme& scheme);

namespace schemes {
FUSEDMOE_API QuantScheme unquantized(DType weights);  ///< f32, f16 or bf16
FUSEDMOE_API QuantScheme mxfp4_w4a16();  ///< E2M1 in blocks of 32 with E8M0 scales (gpt-oss)
}  // namespace schemes

/// Every scheme that has a name, in the order of documentation: "f32", "bf16", "f16",
/// "fp8_tensor", "fp8_block", "mxfp4_w4a16", "nvfp4", "w4a8", "int4_g128", ...
struct NamedScheme {
  std::string name;
  QuantScheme scheme;
};
FUSEDMOE_API const std::vector<NamedScheme>& named_schemes();

/// "f32", "bf16", "mxfp4_w4a16", ...; "q4_k+q6_k" for down matrices in a format of their own; a
/// description of the keys for an unnamed scheme.
FUSEDMOE_API std::string name(const QuantScheme& scheme);
/// Inverse; "name:rule" ("mxfp4:even", "int8_w8a8:full") changes the scale rule of the activations.
/// Throws Error listing the names.
FUSEDMOE_API QuantScheme parse_scheme(std::string_view text);

/// One linear map of one expert: out = values (out, in) x + bias. Every published layout (separate
/// or fused tensors, gate/up in halves or interleaved, transposed) is a matter of strides, so no
/// weight is copied on the way from the file to pack().
///
/// Values by the element type of the scheme's weights:
///   f32, f16, bf16, e4m3, i8  (out, in), any strides; e4m3 also as u8
///   e2m1  u8 (out, ceil(in / 2)), rows contiguous; element 2i in the low nibble of byte i; or e2m1
///         (out, in), the same bytes
///   i4, iq4  i32 (out, ceil(in / 8)), any strides; element i of a word in bits 4i: unsigned codes
///   u8    i32 (out, ceil(in / 4)), any strides; element i of a word in bits 8i: unsigned codes
/// A weight is (code - zero point) * scale * global scale; the zero point of symmetric integer
/// codes is 8 (4 bits) or 128 (8 bits), that of iq4 is 0. In llama.cpp's blocks (Q4_K) zero points
/// have a factor of their own: code * scale * factor - zero point * other factor. What is not used
/// must be undefined.
struct WeightMatrix {
  TensorView values{};
  /// One per block of the key's GroupShape: (ceil(out / rows), ceil(in / cols)), where -1 is the
  /// whole extent; any strides. f32 keys: f32, f16 or bf16. e4m3 and e8m0: that, or u8. Others:
  /// that.
  TensorView scales{};
  TensorView zero_points{};  ///< u8, shape of scales; asymmetric keys only
  /// f32; NVFP4: (1), the multiplier of the block scales; W4A8: (out). llama.cpp's blocks: f16
  /// (out, blocks) or, with zero points, (out, 2 * blocks), of each that of the scales, then the
  /// other.
  TensorView global_scale{};
  /// f32 (1): static scale of the activations that this matrix multiplies: x = code * scale; for
  /// NVFP4 activations x = code * block scale * this. Undefined for dynamic ones.
  TensorView input_scale{};
  TensorView bias{};  ///< (out), f32, bf16 or f16; optional
  /// Where values(0, 0) lies in the grid of scale blocks, for shards that begin inside a block:
  /// element (r, c) has the scale at ((first_row + r) / rows, (first_col + c) / cols).
  std::int64_t first_row = 0, first_col = 0;
};

/// Elements and scales of activations (rows, cols) quantized with `key`: e4m3 and i8 as such, e2m1
/// as u8 (rows, ceil(cols / 2)); scales of the key's type: (1, 1), (rows, 1) or (rows, groups).
struct QuantizedShape {
  DType values_dtype;
  Shape values;
  DType scales_dtype;
  Shape scales;
};
FUSEDMOE_API QuantizedShape quantized_shape(const QuantKey& key, std::int64_t rows,
                                            std::int64_t cols);

/// Quantizes activations. x: (rows, cols) f32, f16 or bf16, rows contiguous; values, scales: as
/// quantized_shape says, contiguous. `scale` is the static scale of a key that is not dynamic
/// (values = x / scale), and the global scale of NVFP4 (the multiplier of its block scales: amax /
/// 2688); it is written to a static key's scales. Allocates nothing.
FUSEDMOE_API void quantize(const TensorView& x, const QuantKey& key, const TensorView& values,
                           const TensorView& scales, std::optional<float> scale = {});

/// How quantize_weights chooses scales.
struct QuantizeOptions {
  MxScaleRule scale_rule = MxScaleRule::kOcp;  ///< of MXFP4 and MXFP8 weights
  /// Of the scales of int4 and int8 groups (f32, f16, bf16); they are rounded to it before the
  /// codes are chosen.
  DType scale_dtype = DType::kF32;
};

/// A matrix in tensors of its own, in the form that WeightMatrix describes.
struct QuantizedMatrix {
  Tensor values, scales, zero_points, global_scale;
  WeightMatrix view() const {
    WeightMatrix matrix;
    matrix.values = values;
    matrix.scales = scales;
    matrix.zero_points = zero_points;
    matrix.global_scale = global_scale;
    return matrix;
  }
};
/// Quantizes one matrix: (out, in) f32, f16 or bf16, any strides, all finite. NVFP4 takes its
/// global scale from `global_amax` where given (w1 and w3 share one), else from the matrix. A key
/// without scales converts. Throws Error for keys that no weights have.
FUSEDMOE_API QuantizedMatrix quantize_weights(const TensorView& values, const QuantKey& key,
                                              const QuantizeOptions& options = {},
                                              std::optional<float> global_amax = {});

/// Element (row, column) of every row, decoded to f32 (out, in): (code - zero point) * scale *
/// global scale, products rounded once each. W4A8: e4m3(code * group scale) * channel scale.
FUSEDMOE_API Tensor dequantize_weights(const WeightMatrix& matrix, const QuantKey& key,
                                       std::int64_t in);

FUSEDMOE_API float bf16_to_f32(std::uint16_t code);
FUSEDMOE_API std::uint16_t f32_to_bf16(float value);  ///< NaN stays NaN (quiet), sign kept

FUSEDMOE_API float f16_to_f32(std::uint16_t code);
FUSEDMOE_API std::uint16_t f32_to_f16(float value);  ///< overflow gives infinity

/// E4M3FN: 1-4-3, bias 7, no infinity, maximum 448 (0x7E), NaN 0x7F and 0xFF.
FUSEDMOE_API float e4m3_to_f32(std::uint8_t code);
/// Saturates at +-448 (infinities too); NaN gives 0x7F.
FUSEDMOE_API std::uint8_t f32_to_e4m3(float value);

/// E5M2: 1-5-2, bias 15, with infinities; maximum 57344.
FUSEDMOE_API float e5m2_to_f32(std::uint8_t code);
/// Saturates at +-57344 (infinities too); NaN gives 0x7F.
FUSEDMOE_API std::uint8_t f32_to_e5m2(float value);

/// E2M1 code in the low nibble: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the negatives (8 = -0).
FUSEDMOE_API float e2m1_to_f32(std::uint8_t code);
/// Ties to the even code; saturates at +-6; NaN gives +6 (7); the sign of a zero is kept.
FUSEDMOE_API std::uint8_t f32_to_e2m1(float value);

/// E8M0: 2^(code - 127); code 0 is 2^-127 (not 0); 255 is NaN.
FUSEDMOE_API float e8m0_to_f32(std::uint8_t code);
/// Rounds up to a power of two; 0 and negative give 0, infinity 254, NaN 255.
FUSEDMOE_API std::uint8_t f32_to_e8m0(float value);

/// Two's complement nibble, -8 to 7.
FUSEDMOE_API int int4_to_int(std::uint8_t code);
/// Ties to even; saturates; NaN gives 0.
FUSEDMOE_API std::uint8_t f32_to_int4(float value);

/// Element at linear position `index` of memory of a floating-point, FP8, E8M0, FP4 or integer
/// dtype, as fp32.
FUSEDMOE_API float load_f32(const void* data, DType dtype, std::int64_t index);
/// Rounds `value` to dtype (f32, f16, bf16) and stores it.
FUSEDMOE_API void store_f32(void* data, DType dtype, std::int64_t index, float value);

/// Contiguous copy with conversion between any of f64, f32, f16, bf16; `source` may be strided.
FUSEDMOE_API void convert(const TensorView& source, const TensorView& destination);

// ------------------------------------------------------------------------------------------------
// Layouts of scales and of integer codes in checkpoints and engines, to and from those of
// WeightMatrix. Each pair of functions is an inverse pair; padding is zero. Matrices are views in
// host memory of any strides unless said otherwise. Functions throw Error for shapes and dtypes
// that do not fit, before they write.

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

}  // namespace fusedmoe
