// Quantization schemes as data: one operand's format is a QuantKey, weights + activations a
// QuantScheme. A new scheme is a new value, never a new class.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "fusedmoe/dtype.h"
#include "fusedmoe/export.h"

namespace fusedmoe {

/// Extent of one scale, in rows and columns of the operand; -1 is the whole extent. (-1, -1) per
/// tensor, (1, -1) per token, (-1, 1) per channel, (1, 32) per token and group of 32.
struct GroupShape {
  std::int64_t rows = -1;
  std::int64_t cols = -1;
  bool operator==(const GroupShape&) const = default;
};

/// One operand's number format.
struct QuantKey {
  DType value = DType::kBF16;         ///< element type
  std::optional<DType> scale;         ///< type of the scales; none when not quantized
  GroupShape group;                   ///< meaningful with a scale
  std::optional<DType> global_scale;  ///< second-level scale per tensor (NVFP4)
  bool dynamic = false;               ///< scale computed from the data at run time
  bool symmetric = true;              ///< false: has zero points

  bool quantized() const { return scale.has_value(); }
  bool operator==(const QuantKey&) const = default;
};

/// Formats of the expert weights and of the activations between router and output. Activations
/// without a value keep the dtype of the hidden states.
struct QuantScheme {
  QuantKey weights;
  std::optional<QuantKey> activations;
  bool operator==(const QuantScheme&) const = default;
};

namespace schemes {
FUSEDMOE_API QuantScheme unquantized(DType weights);  ///< f32, f16 or bf16
FUSEDMOE_API QuantScheme mxfp4_w4a16();  ///< E2M1 in blocks of 32 with E8M0 scales (gpt-oss)
}  // namespace schemes

/// "f32", "bf16", "mxfp4_w4a16", ...; a description of the keys for an unnamed scheme.
FUSEDMOE_API std::string name(const QuantScheme& scheme);
FUSEDMOE_API QuantScheme parse_scheme(std::string_view text);

}  // namespace fusedmoe
