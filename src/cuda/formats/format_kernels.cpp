#include "cuda/formats/format_kernels.h"

#include "core/check.h"

namespace fusedmoe::cuda {

const FormatKernels& kernels_of(const WeightFormat& format) {
  for (const auto& of_file : {as_is_kernels, fp4_kernels, fp8_decoded_kernels, integer_kernels,
                              mxfp4_fp8_kernels, w4a8_kernels}) {
    for (const FormatKernels& kernels : of_file()) {
      if (kernels.format.name == format.name) return kernels;
    }
  }
  throw Error::internal(core::format("no kernels of {}", format.name));
}

}  // namespace fusedmoe::cuda
