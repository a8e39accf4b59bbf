// Which tiles hold the weights of a number format, and what elements the rows have that multiply
// them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/kernels.h"
#include "fusedmoe/experts.h"

namespace fusedmoe::cpu {

/// Whether the CPU experts have tiles for weights of a key.
bool has_codes(const QuantKey& weights);
/// Whether they have rows quantized with a key: the kernels of integers add up 32 products at least
/// before they multiply by a scale.
bool has_rows(const std::optional<QuantKey>& activations);
/// Element type of the rows that enter the GEMMs, with this machine's instruction set.
Compute compute_of(const QuantScheme& scheme, DType dtype);
inline std::int64_t element_bytes(Compute compute) {
  return compute == Compute::kF32 ? 4 : compute == Compute::kInt8 ? 1 : 2;
}

/// Whether there is one scale per column or tensor; such scales are not in the stream.
bool has_column_scales(const QuantKey& key);
/// Format of the tiles of these matrices. If a matrix begins inside a scale's group, tiles have
/// groups of 32 instead, each with one scale. Of no matrices: that of f32 scales and whole groups,
/// whose tiles are the largest but for groups of 32.
TileFormat format_of(const QuantKey& key, const std::vector<const WeightMatrix*>& matrices);

}  // namespace fusedmoe::cpu
