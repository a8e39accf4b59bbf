#include "cuda/gemm/instances/launch_instance.cuh"

template void fusedmoe::cuda::launch_instance<fusedmoe::cuda::Bf16Weights, 4>(
    const fusedmoe::cuda::GroupedGemm&, void*);
