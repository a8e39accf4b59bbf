// The launch of one kernel: what generated files define for the tile shapes of each policy.
#pragma once

#include "cuda/device/launch.h"
#include "cuda/device/properties.h"
#include "cuda/mlp/kernel_family.h"
#include "cuda/sm90/fused_mlp_kernel.cuh"
#include "fusedmoe/tensor.h"

namespace fusedmoe::cuda::sm90 {

template <OperandPolicy Operands, int kIndex>
void launch_kernel(const FusedMlpParams& params, const Stream& stream) {
  using K = Kernel<Operands, kIndex>;
  using Activation = typename K::Activation;
  ActivationMaps maps{};
  for (int i = 0; i < params.num_gemms; ++i) {
    const GemmParams& gemm = params.gemms[i];
    const MappedRows rows{
        gemm.activations, kTensorMapType<Activation>, sizeof(Activation), gemm.num_rows, gemm.k,
        gemm.row_pitch};
    constexpr int kFirst =
        K::kWideCopies ? kRowBoxes - 1 : ActivationMaps::first_box(K::kMaxTokens);
    for (int box = kFirst; box < kRowBoxes; ++box) {
      maps.boxes[i][box] = make_tensor_map(rows, ActivationMaps::rows(box));
    }
    if (K::kWideCopies) maps.boxes[i][0] = make_tensor_map(rows, kRowUnit, K::kBlocksPerStage);
  }
  static_assert(sizeof(SharedMemory<K>) <= K::kSharedLimit);
  const int multiprocessors = multiprocessor_count(current_device());
  const auto blocks = static_cast<unsigned>(multiprocessors / K::kCluster * K::kCluster);
  launch_clusters(fused_mlp_kernel<K>, K::kCluster, dim3(blocks), dim3(K::kThreads),
                  sizeof(SharedMemory<K>), static_cast<cudaStream_t>(stream.handle),
                  params.order != LaunchOrder::kApart, params, maps);
}

}  // namespace fusedmoe::cuda::sm90
