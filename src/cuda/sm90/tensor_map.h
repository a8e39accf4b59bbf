// Tensor maps of the bulk tensor copy engine (TMA).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fusedmoe::cuda::sm90 {

/// The type of an element in a tensor map.
template <typename Element>
inline constexpr CUtensorMapDataType kTensorMapType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
template <>
inline constexpr CUtensorMapDataType kTensorMapType<__nv_bfloat16> =
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
inline constexpr CUtensorMapDataType kTensorMapType<__half> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

/// Rows of elements in device memory, 16-byte aligned.
struct MappedRows {
  const void* data = nullptr;
  CUtensorMapDataType type{};
  int element_bytes = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t pitch = 0;  ///< elements; rows start at 16 bytes
};

/// Copies boxes of `box_rows` rows by one K block, 128 bytes of columns, in the 128-byte swizzle;
/// zeros beyond the edges. With `box_k_blocks` above 1 a box is so many neighbouring K blocks, and
/// coordinates are (0, row, K block); whole K blocks only, zeros instead of one that is not.
/// Throws Error when the driver refuses.
CUtensorMap make_tensor_map(const MappedRows& rows, int box_rows, int box_k_blocks = 1);

}  // namespace fusedmoe::cuda::sm90
