// One kernel of the grouped GEMM and its launch: what each file of instances/ defines once.
#pragma once

#include "cuda/device/launch.h"
#include "cuda/gemm/grouped_gemm_sm90.cuh"
#include "cuda/gemm/instances/instances.h"

namespace fusedmoe::cuda {

/// Blocks of a persistent kernel that fills the current device.
inline unsigned num_multiprocessors() {
  int device = 0, count = 0;
  FUSEDMOE_CUDA_CHECK(cudaGetDevice(&device));
  FUSEDMOE_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return static_cast<unsigned>(count);
}

template <typename Weights, int kConfig>
void launch_instance(const GroupedGemm& problem, void* stream) {
  constexpr TileConfig kTile = kTileConfigs[kConfig];
  using Config = GemmConfig<Weights, kTile>;
  RowMaps maps{};
  for (int i = 0; i < problem.num_phases; ++i) {
    const GemmPhase& phase = problem.phases[i];
    const MappedRows rows{phase.x, phase.x_rows, phase.k, phase.x_pitch};
    constexpr int kFirst =
        Config::kWideCopies ? kRowBoxes - 1 : RowMaps::first_box(kTile.max_tokens);
    for (int box = kFirst; box < kRowBoxes; ++box) {
      maps.boxes[i][box] = make_tensor_map(rows, RowMaps::rows(box));
    }
    if (Config::kWideCopies) maps.boxes[i][0] = make_tensor_map(rows, kRowUnit, Config::kBlocks);
  }
  const unsigned blocks = num_multiprocessors() / kTile.cluster * kTile.cluster;
  launch_clusters(grouped_gemm_kernel<Weights, kConfig>, kTile.cluster, dim3(blocks),
                  dim3(Config::kThreads), sizeof(SharedStorage<Config>),
                  static_cast<cudaStream_t>(stream), problem.overlap_previous, problem, maps);
}

}  // namespace fusedmoe::cuda
