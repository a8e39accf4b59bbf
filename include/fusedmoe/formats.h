// Number formats: conversions between fp32 and the storage formats, bit-exact.
//
// Narrowing rounds to nearest, ties to even, unless said otherwise. Sources: IEEE 754, the OCP FP8
// and Microscaling (MX) specifications; docs/architecture.md, "Formats".
#pragma once

#include <cstdint>

#include "fusedmoe/export.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe {

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

}  // namespace fusedmoe
