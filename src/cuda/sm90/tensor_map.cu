#include "cuda/sm90/tensor_map.h"

#include <algorithm>
#include <string>

#include "cuda/device/check.h"

namespace fusedmoe::cuda::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// From the driver at run time: a build must start where there is none.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  FUSEDMOE_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                       cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess) {
    throw Error::device(result,
                        "the driver has no cuTensorMapEncodeTiled; CUDA 12 or later is needed");
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

CUtensorMap make_tensor_map(const MappedRows& rows, int box_rows, int box_k_blocks) {
  static const Encode encode = find_encode();
  constexpr cuuint64_t kBlockBytes = 128;
  const auto element_bytes = static_cast<cuuint64_t>(rows.element_bytes);
  const cuuint64_t block_k = kBlockBytes / element_bytes;
  const auto columns = static_cast<cuuint64_t>(rows.columns);
  const bool is_deep = box_k_blocks > 1;
  const cuuint64_t extents[3] = {is_deep ? std::min(columns, block_k) : columns,
                                 static_cast<cuuint64_t>(rows.rows),
                                 std::max<cuuint64_t>(1, columns / block_k)};
  const cuuint64_t pitches[2] = {static_cast<cuuint64_t>(rows.pitch) * element_bytes, kBlockBytes};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(block_k), static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_k_blocks)};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, rows.type, is_deep ? 3 : 2, const_cast<void*>(rows.data), extents, pitches, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error::device(result,
                        "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result));
  }
  return map;
}

}  // namespace fusedmoe::cuda::sm90
