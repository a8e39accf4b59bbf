#include "cuda/gemm/instances/launch_instance.cuh"

template void fusedmoe::cuda::launch_instance<fusedmoe::cuda::Mxfp4Weights, 3>(
    const fusedmoe::cuda::GroupedGemm&, void*);
