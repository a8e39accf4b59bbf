# Writes the source files that instantiate kernels for the policies of operands, src/cuda/formats/: a
# file for each policy and folder of kernels, as three quarters of the time that one instance takes
# are its headers, and a table for each folder. Sets FUSEDMOE_<FOLDER>_KERNELS to them. A line below is
# a policy: its header, its type, and how many tile shapes it has of sm90.
set(operands
  as_is.cuh       Bf16Operands           7
  as_is.cuh       F16Operands            7
  as_is.cuh       Fp8Operands            6
  as_is.cuh       Fp8RowOperands         5
  fp8_f16.cuh     Fp8F16Operands         4
  w4a8.cuh        W4a8Operands           5
  mxfp4_fp8.cuh   Mxfp4Fp8Operands       5
  fp4.cuh         Mxfp4Bf16Operands      7
  fp4.cuh         Mxfp4QuantizedOperands 5
  fp4.cuh         Mxfp4F16Operands       5
  fp4.cuh         Nvfp4Bf16Operands      5
  fp4.cuh         Nvfp4F16Operands       5
  integer.cuh     Int4SymmetricOperands  5
  integer.cuh     Int4G32SymmetricOperands 5
  integer.cuh     Int4Bf16Operands       5
  integer.cuh     Int4F16Operands        5
  integer.cuh     Int4G32Bf16Operands    5
  integer.cuh     Int4G32F16Operands     5
  integer.cuh     Int8Bf16Operands       5
  integer.cuh     Int8F16Operands        5
  fp8_decoded.cuh DecodedE4m3Operands    5
  fp8_decoded.cuh ScaledE4m3Operands     5)

set(kernels ${CMAKE_CURRENT_BINARY_DIR}/kernels)
# The tiles of one policy, by the kernels of a folder.
function(fusedmoe_write_tiles folder header policy tiles)
  set(launches "")
  math(EXPR last "${tiles} - 1")
  foreach(index RANGE ${last})
    string(APPEND launches "      &launch_kernel<${policy}, ${index}>,\n")
  endforeach()
  file(CONFIGURE OUTPUT ${kernels}/${folder}/${policy}.cu @ONLY CONTENT [[
#include "cuda/formats/@header@"
#include "cuda/@folder@/launch_kernel.cuh"

namespace fusedmoe::cuda {

FormatLaunches @folder@_@policy@() {
  static constexpr LaunchMlp kLaunches[] = {
@launches@  };
  static_assert(std::size(kLaunches) == kernel_set(@policy@::kFormat).tiles.size(),
                "cmake/FusedmoeKernels.cmake has another number");
  return {@policy@::kFormat.name, kLaunches};
}

}  // namespace fusedmoe::cuda
]])
endfunction()

set(FUSEDMOE_SM90_KERNELS)
set(FUSEDMOE_ONE_TOKEN_KERNELS)
set(declarations "")
set(calls "")
set(one_token_declarations "")
set(one_token_calls "")
while(operands)
  list(POP_FRONT operands header policy tiles)
  fusedmoe_write_tiles(sm90 ${header} ${policy} ${tiles})
  list(APPEND FUSEDMOE_SM90_KERNELS ${kernels}/sm90/${policy}.cu)
  string(APPEND declarations "FormatLaunches sm90_${policy}();\n")
  string(APPEND calls "sm90_${policy}(), ")

  file(CONFIGURE OUTPUT ${kernels}/one_token/${policy}.cu @ONLY CONTENT [[
#include "cuda/formats/@header@"
#include "cuda/one_token/launch_one_token.cuh"

namespace fusedmoe::cuda {

OneTokenKernel one_token_@policy@() {
  return {@policy@::kFormat.name, &launch_one_token<@policy@>};
}

}  // namespace fusedmoe::cuda
]])
  list(APPEND FUSEDMOE_ONE_TOKEN_KERNELS ${kernels}/one_token/${policy}.cu)
  string(APPEND one_token_declarations "OneTokenKernel one_token_${policy}();\n")
  string(APPEND one_token_calls "one_token_${policy}(), ")
endwhile()

# A kernel that spills registers is slow, not wrong: nobody would notice.
set_source_files_properties(${FUSEDMOE_SM90_KERNELS} ${FUSEDMOE_ONE_TOKEN_KERNELS}
  PROPERTIES COMPILE_OPTIONS "-Xptxas=-Werror")

# Names that only these files know.
file(CONFIGURE OUTPUT ${kernels}/sm90/launches.cpp @ONLY CONTENT [[
#include "cuda/sm90/family.h"

namespace fusedmoe::cuda {

@declarations@
std::span<const FormatLaunches> sm90_launches() {
  static const FormatLaunches all[] = {@calls@};
  return all;
}

}  // namespace fusedmoe::cuda
]])
list(APPEND FUSEDMOE_SM90_KERNELS ${kernels}/sm90/launches.cpp)
file(CONFIGURE OUTPUT ${kernels}/one_token/launches.cpp @ONLY CONTENT [[
#include "core/check.h"
#include "cuda/one_token/one_token.h"

namespace fusedmoe::cuda {

@one_token_declarations@
OneTokenLaunch one_token_launch(const WeightFormat& format) {
  static const OneTokenKernel all[] = {@one_token_calls@};
  for (const OneTokenKernel& kernel : all) {
    if (kernel.format == format.name) return kernel.launch;
  }
  throw Error::internal(core::format("no kernel of one token of {}", format.name));
}

}  // namespace fusedmoe::cuda
]])
list(APPEND FUSEDMOE_ONE_TOKEN_KERNELS ${kernels}/one_token/launches.cpp)
