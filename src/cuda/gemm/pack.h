// Packing: matrices of one expert, as the checkpoint has them -> records (records.h), on the
// device.
#pragma once

#include <cstdint>

#include "cuda/gemm/records.h"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda {

/// Device memory. Rows of w13: gate, then up; of w2 or a non-gated w13: one matrix.
struct PackSource {
  /// bf16, f16: (rows, k) elements. mxfp4: (rows, ceil(k / 2)) bytes, element 2 i in the low
  /// nibble.
  const void* values = nullptr;
  const std::uint8_t* scales = nullptr;  ///< mxfp4: (rows, ceil(k / 32)) E8M0
  std::int64_t width = 0;                ///< rows of one of the matrices
  std::int64_t k = 0;
  bool gated = false;  ///< 2 width rows
  /// mxfp4: the exponent field of a multiplier is scale + 126 - exponent_shift, in [1, 254].
  int exponent_shift = 0;
};

/// Writes record_grid(width, k, gated).bytes(format) bytes at `records`. Asynchronous.
void pack_records(WeightFormat format, const PackSource& source, void* records,
                  const Stream& stream);

}  // namespace fusedmoe::cuda
