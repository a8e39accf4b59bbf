# Writes one source file for each policy of operands with its instances of the fused MLP kernel, and
# sets FUSEDMOE_KERNELS to the files. Three quarters of the time that one instance takes are its
# headers, so a policy's share them. A line is a policy of src/cuda/formats/: its header, its
# type, the number of its tile shapes.
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

set(FUSEDMOE_KERNELS)
while(operands)
  list(POP_FRONT operands header policy tiles)
  math(EXPR last "${tiles} - 1")
  set(instances "")
  foreach(index RANGE ${last})
    string(APPEND instances
      "template void launch_kernel<${policy}, ${index}>(const FusedMlpParams&, const Stream&);\n")
  endforeach()
  string(APPEND instances "template void launch_one_token<${policy}>(\n"
    "    const OneTokenParams&, const OneTokenShape&, const Stream&);\n")
  set(file ${CMAKE_CURRENT_BINARY_DIR}/kernels/${policy}.cu)
  file(CONFIGURE OUTPUT ${file} @ONLY CONTENT [[
#include "cuda/sm90/launch_kernel.cuh"
#include "cuda/formats/@header@"
#include "cuda/one_token/launch_one_token.cuh"

namespace fusedmoe::cuda {
static_assert(kernel_set(@policy@::kFormat).tiles.size() == @tiles@, "cmake/FusedmoeKernels.cmake has another number");
@instances@}  // namespace fusedmoe::cuda
]])
  list(APPEND FUSEDMOE_KERNELS ${file})
endwhile()

# A kernel that spills registers is slow, not wrong: nobody would notice.
set_source_files_properties(${FUSEDMOE_KERNELS} PROPERTIES COMPILE_OPTIONS "-Xptxas=-Werror")
