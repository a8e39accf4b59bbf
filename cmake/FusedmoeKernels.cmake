# Writes one source file for each instance of the fused MLP kernel, so that they build side by side,
# and sets FUSEDMOE_KERNELS to the files. A line is a policy of src/cuda/gemm/operands/: its header,
# its type, the number of its tile shapes.
set(operands
  unquantized.cuh Bf16Operands  7
  unquantized.cuh F16Operands   7
  mxfp4.cuh       Mxfp4Operands 7)

set(FUSEDMOE_KERNELS)
while(operands)
  list(POP_FRONT operands header policy tiles)
  math(EXPR last "${tiles} - 1")
  foreach(index RANGE ${last})
    set(file ${CMAKE_CURRENT_BINARY_DIR}/kernels/${policy}_${index}.cu)
    file(CONFIGURE OUTPUT ${file} @ONLY CONTENT [[
#include "cuda/gemm/launch_kernel.cuh"
#include "cuda/gemm/operands/@header@"

namespace fusedmoe::cuda {
static_assert(@policy@::kTiles.size() == @tiles@, "cmake/FusedmoeKernels.cmake has another number");
template void launch_kernel<@policy@, @index@>(const FusedMlpParams&, const Stream&);
}  // namespace fusedmoe::cuda
]])
    list(APPEND FUSEDMOE_KERNELS ${file})
  endforeach()
endwhile()

# A kernel that spills registers is slow, not wrong: nobody would notice.
set_source_files_properties(${FUSEDMOE_KERNELS} PROPERTIES COMPILE_OPTIONS "-Xptxas=-Werror")
