// The launch of one kernel: what generated files define for the tile shapes of each policy.
#pragma once

#include "cuda/device/launch.h"
#include "cuda/mlp/kernel_family.h"
#include "cuda/sm80/fused_mlp_kernel.cuh"
#include "fusedmoe/error.h"

namespace fusedmoe::cuda::sm80 {

template <OperandPolicy Operands, Fp8 kFp8, int kIndex>
void launch_kernel(const FusedMlpParams& given, const Stream& stream) {
  using K = Kernel<Operands, kFp8, kIndex>;
  if (given.pass.tiles > 0 && given.pass.rows.kind != K::kPassKind) {
    throw Error::internal("the row pass makes other rows than this kernel reads");
  }
  FusedMlpParams params = given;
  params.stages = ring_stages(K::kTile, K::kSet, ring_offset<K>(params),
                              limits_of(stream.device).multiprocessor_shared_bytes);
  const std::size_t bytes = shared_bytes<K>(params);
  const int blocks = resident_blocks(reinterpret_cast<const void*>(fused_mlp_kernel<K>),
                                     K::kThreads, bytes, stream.device);
  launch(fused_mlp_kernel<K>, dim3(static_cast<unsigned>(blocks)), dim3(K::kThreads), bytes, stream,
         params.order != LaunchOrder::kApart, params);
}

}  // namespace fusedmoe::cuda::sm80
