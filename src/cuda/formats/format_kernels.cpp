#include "cuda/formats/format_kernels.h"

#include <algorithm>
#include <array>

#include "core/check.h"
#include "cuda/formats/policy_kernels.h"

namespace fusedmoe::cuda {

const FormatKernels& kernels_of(const WeightFormat& format) {
  static const std::array kAll = {bf16_kernels(),           f16_kernels(),
                                  fp8_rows_kernels(),       fp8_kernels(),
                                  fp8_f16_kernels(),        w4a8_kernels(),
                                  mxfp4_bf16_kernels(),     mxfp4_quantized_kernels(),
                                  mxfp4_f16_kernels(),      mxfp4_fp8_kernels(),
                                  nvfp4_bf16_kernels(),     nvfp4_f16_kernels(),
                                  int4_symmetric_kernels(), int4_g32_symmetric_kernels(),
                                  int4_bf16_kernels(),      int4_f16_kernels(),
                                  int4_g32_bf16_kernels(),  int4_g32_f16_kernels(),
                                  int8_bf16_kernels(),      int8_f16_kernels(),
                                  decoded_e4m3_kernels(),   scaled_e4m3_kernels()};
  const auto found = std::find_if(kAll.begin(), kAll.end(), [&](const FormatKernels& kernels) {
    return kernels.format.name == format.name;
  });
  if (found == kAll.end()) throw Error::internal(core::format("no kernels of {}", format.name));
  return *found;
}

}  // namespace fusedmoe::cuda
