#include "cuda/rows/permute.h"

#include "cuda/device/launch.h"
#include "cuda/rows/row_transform.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 128;

/// A block reads the row of a token once and writes it to every slot's row.
template <typename Transform>
__global__ void __launch_bounds__(kThreads)
    permute_rows_kernel(const Transform transform, const std::int32_t* slot_to_row, int topk) {
  constexpr int kUnits = 4;  // of a thread, read at the same time
  const std::int64_t token = blockIdx.x;
  cudaGridDependencySynchronize();
  for (int first = 0; first < transform.units(); first += kUnits * kThreads) {
    const int unit = first + static_cast<int>(threadIdx.x);
    typename Transform::Value values[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) values[u] = transform.read(token, unit + u * kThreads);
    for (int j = 0; j < topk; ++j) {
      const std::int64_t row = slot_to_row[token * topk + j];
      if (row < 0) continue;
#pragma unroll
      for (int u = 0; u < kUnits; ++u) transform.write(row, unit + u * kThreads, values[u]);
    }
  }
}

/// False where rows cannot be cut into units of this type.
template <typename Unit>
bool launch_copy(const PermuteRows& args, const Stream& stream) {
  const auto all = reinterpret_cast<std::uintptr_t>(args.rows) |
                   reinterpret_cast<std::uintptr_t>(args.permuted) |
                   static_cast<std::uintptr_t>(args.row_pitch | args.row_bytes);
  if (all % sizeof(Unit) != 0) return false;
  launch(permute_rows_kernel<CopyRows<Unit>>, dim3(static_cast<unsigned>(args.num_tokens)),
         dim3(kThreads), 0, stream, true,
         CopyRows<Unit>(args.rows, args.row_pitch, args.permuted, args.row_bytes), args.slot_to_row,
         static_cast<int>(args.topk));
  return true;
}

}  // namespace

void permute_rows(const PermuteRows& args, const Stream& stream) {
  if (args.num_tokens == 0 || args.row_bytes == 0) return;
  launch_copy<uint4>(args, stream) || launch_copy<std::uint32_t>(args, stream) ||
      launch_copy<std::uint16_t>(args, stream) || launch_copy<std::uint8_t>(args, stream);
}

}  // namespace fusedmoe::cuda
