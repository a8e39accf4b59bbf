#include "cuda/experts.h"

namespace fusedmoe::cuda {

std::vector<std::shared_ptr<const Experts>> make_all_experts() {
  return {};
}

}  // namespace fusedmoe::cuda
