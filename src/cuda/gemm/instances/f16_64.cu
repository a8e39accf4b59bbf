#include "cuda/gemm/instances/launch_instance.cuh"

template void fusedmoe::cuda::launch_instance<fusedmoe::cuda::F16Weights, 2>(
    const fusedmoe::cuda::GroupedGemm&, void*);
