#include "cuda/sm90/descriptor.h"

#include "cuda/experts/descriptor.h"
#include "cuda/sm90/family.h"

namespace fusedmoe::cuda {

const ExpertsDescriptor& sm90_descriptor() {
  static const FamilyDescriptor descriptor(sm90_family(), "sm_90a");
  return descriptor;
}

}  // namespace fusedmoe::cuda
