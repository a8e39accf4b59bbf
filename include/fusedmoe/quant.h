// Quantization schemes as data: one operand's format is a QuantKey, weights + activations a
// QuantScheme. A new scheme is a new value, never a new class.
//
// Operands are matrices of rows along which a GEMM sums: weights (out, in), activations (tokens,
// in). A scale belongs to a block of GroupShape elements, counted from the matrix's first one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fusedmoe/dtype.h"
#include "fusedmoe/export.h"

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
  DType value = DType::kBF16;         ///< element type
  std::optional<DType> scale;         ///< type of the scales; none when not quantized
  GroupShape group;                   ///< of one scale; meaningful with a scale
  std::optional<DType> global_scale;  ///< second-level scale (NVFP4: f32; W4A8: f32 per channel)
  GroupShape global_group;            ///< of one second-level scale
  bool dynamic = false;               ///< scale computed from the data at run time
  bool symmetric = true;              ///< false: has zero points
  MxScaleRule scale_rule = MxScaleRule::kOcp;  ///< of dynamic E8M0 scales per group of 32

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
}  // namespace keys

/// Formats of the expert weights and of the activations between router and output. Activations
/// without a value keep the dtype of the hidden states.
struct QuantScheme {
  QuantKey weights;
  std::optional<QuantKey> activations;
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

/// "f32", "bf16", "mxfp4_w4a16", ...; a description of the keys for an unnamed scheme.
FUSEDMOE_API std::string name(const QuantScheme& scheme);
/// Inverse; "name:rule" ("mxfp4:even") changes the scale rule of the activations. Throws Error
/// listing the names.
FUSEDMOE_API QuantScheme parse_scheme(std::string_view text);

}  // namespace fusedmoe
