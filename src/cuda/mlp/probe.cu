// A kernel that does nothing, compiled for the GPUs of each family of kernels: sm80_probe(),
// sm89_probe() and sm90_probe(), as the build calls it.
namespace fusedmoe::cuda {
namespace {

__global__ void probe() {}

}  // namespace

const void* FUSEDMOE_PROBE() {
  return reinterpret_cast<const void*>(&probe);
}

}  // namespace fusedmoe::cuda
