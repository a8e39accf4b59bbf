// The inverse of pack.h, on the host: records (records.h) -> rows as a checkpoint has them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/gemm/records.h"

namespace fusedmoe::cuda {

/// The records of one matrix in host memory, 4-byte aligned.
struct RecordView {
  WeightFormat format = WeightFormat::kBF16;
  const std::byte* records = nullptr;
  std::int64_t k_blocks = 0;
  std::int64_t k = 0;
  int exponent_shift = 0;  ///< mxfp4: see PackSource
};

/// Row `row` of the packed matrix. bf16, f16: `values` gets k elements. mxfp4: ceil(k / 2) bytes
/// and ceil(k / 32) E8M0 `scales`; an odd k leaves the last high nibble 0.
void unpack_row(const RecordView& source, std::int64_t row, void* values, std::uint8_t* scales);

}  // namespace fusedmoe::cuda
