#include "cuda/sm80/descriptor.h"

#include "cuda/experts/descriptor.h"
#include "cuda/sm80/family.h"

namespace fusedmoe::cuda {

const ExpertsDescriptor& sm80_descriptor() {
  static const FamilyDescriptor descriptor(sm80_family(), "sm_80");
  return descriptor;
}

}  // namespace fusedmoe::cuda
