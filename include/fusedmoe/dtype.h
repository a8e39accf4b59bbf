// Element types of tensors. Values, widths and DLPack codes; no conversions (see formats.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "fusedmoe/export.h"

namespace fusedmoe {

/// Element type of a tensor. Floating-point formats follow `docs/architecture.md`, "Formats".
enum class DType : std::uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kE4M3,  ///< FP8 E4M3FN: no infinity, maximum 448
  kE5M2,  ///< FP8 E5M2
  kE8M0,  ///< power-of-two scale, 2^(code - 127), 255 = NaN
  kE2M1,  ///< FP4; two elements per byte, element 2i in the low nibble
  kI4,    ///< two's complement nibble; packed like kE2M1
  kI8,
  kU8,
  kI16,
  kI32,
  kI64,
  kBool,
};

/// Width of one element in bits (4 for the packed types).
FUSEDMOE_API int bits(DType dtype);

/// Bytes that `count` consecutive elements take; packed types round up to whole bytes.
FUSEDMOE_API std::int64_t bytes(DType dtype, std::int64_t count);

/// Short lower-case name: "f32", "bf16", "e4m3", ...
FUSEDMOE_API std::string_view name(DType dtype);

/// Inverse of `name`; also accepts "float32", "bfloat16", "float16".
FUSEDMOE_API std::optional<DType> parse_dtype(std::string_view text);

/// `DLDataType` of DLPack 1.1 (code, bits; lanes is always 1).
struct DlpackType {
  std::uint8_t code;
  std::uint8_t bits;
};
FUSEDMOE_API DlpackType dlpack_type(DType dtype);
FUSEDMOE_API std::optional<DType> dtype_from_dlpack(DlpackType type);

}  // namespace fusedmoe
