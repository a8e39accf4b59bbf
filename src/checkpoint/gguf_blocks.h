// The quantized blocks of GGUF files -> parts of a WeightMatrix.
#pragma once

#include <optional>

#include "files/gguf.h"
#include "fusedmoe/quant.h"

namespace fusedmoe::checkpoint {

/// The number format of a ggml type of blocks; none for those that nothing here computes.
std::optional<QuantKey> key_of(const files::GgmlType& type);
/// "Q4_0, Q8_0, ...": those that have one.
std::string served_types();

/// `blocks`: u8 (rows, bytes of a row), or of rank 3 whose first two dimensions are the rows. Every
/// part of the result has these rows. Scales that are f16 stay so.
QuantizedMatrix decode_blocks(const Tensor& blocks, const files::GgmlType& type);

}  // namespace fusedmoe::checkpoint
