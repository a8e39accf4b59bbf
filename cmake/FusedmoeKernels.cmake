# Writes the source files that instantiate kernels for the policies of operands, src/cuda/formats/, and
# a table for each family of kernels; sets FUSEDMOE_KERNELS_<family> to them. Most of the time that a
# file takes are its headers: those of few kernels share a file with all policies of a header, sm90 has
# one for each policy. A line below is a policy: its header, its type, how many tile shapes it has of
# sm90, of sm80 and of sm89, and how many kernels of one token.
set(operands
  as_is.cuh       Bf16Operands             7 6 0 1
  as_is.cuh       F16Operands              7 6 0 1
  as_is.cuh       Fp8Operands              5 5 4 1
  as_is.cuh       Fp8RowOperands           6 5 4 1
  fp8_f16.cuh     Fp8F16Operands           4 5 4 1
  int8_rows.cuh   Int8RowOperands          0 6 0 0
  int8_rows.cuh   Int8RowF16Operands       0 6 0 0
  w4a8.cuh        W4a8Operands             5 4 4 1
  mxfp4_fp8.cuh   Mxfp4Fp8Operands         5 4 4 1
  fp4.cuh         Mxfp4Bf16Operands        7 4 0 1
  fp4.cuh         Mxfp4QuantizedOperands   5 4 0 1
  fp4.cuh         Mxfp4F16Operands         5 4 0 1
  fp4.cuh         Nvfp4Bf16Operands        5 4 0 1
  fp4.cuh         Nvfp4F16Operands         5 4 0 1
  integer.cuh     Int4SymmetricOperands    5 4 0 1
  integer.cuh     Int4G32SymmetricOperands 5 4 0 1
  integer.cuh     Int4Bf16Operands         5 4 0 1
  integer.cuh     Int4F16Operands          5 4 0 1
  integer.cuh     Int4G32Bf16Operands      5 4 0 1
  integer.cuh     Int4G32F16Operands       5 4 0 1
  integer.cuh     Int8Bf16Operands         5 4 0 1
  integer.cuh     Int8F16Operands          5 4 0 1
  fp8_decoded.cuh DecodedE4m3Operands      5 4 0 1
  fp8_decoded.cuh ScaledE4m3Operands       5 4 0 1)

set(kernels ${CMAKE_CURRENT_BINARY_DIR}/kernels)

# fusedmoe_add_kernels(<family> <file> <header> <launch header> <policy> <function>): appends a function
# <family>_<policy>() that returns what the family's table has of the policy.
function(fusedmoe_add_kernels family file header launch policy content)
  set(path ${kernels}/${family}/${file}.cu)
  if(NOT path IN_LIST FUSEDMOE_KERNELS_${family})
    set(text "#include \"cuda/formats/${header}\"\n#include \"cuda/${launch}\"\n\n"
      "namespace fusedmoe::cuda {\n")
    list(JOIN text "" text)
    # A kernel that spills registers is slow, not wrong: nobody would notice. The others have PTX beside
    # machine code. nvcc stores ptxas's options with it, so a driver would refuse what spills on its
    # GPU. For them scripts/check-cuda-build.sh looks through the log of a build.
    if(family STREQUAL sm90)
      set_source_files_properties(${path} PROPERTIES COMPILE_OPTIONS "-Xptxas=-Werror")
    endif()
    set(FUSEDMOE_KERNELS_${family} ${FUSEDMOE_KERNELS_${family}} ${path} PARENT_SCOPE)
  else()
    set(text "${text_${family}_${file}}")
  endif()
  string(CONFIGURE "${content}" content @ONLY)
  set(text_${family}_${file} "${text}\n${content}" PARENT_SCOPE)
  set(policies_${family} ${policies_${family}} ${policy} PARENT_SCOPE)
endfunction()

# The tiles of one policy. sm80 and sm89 are of one folder: they differ in what they multiply for FP8.
set(folder_sm90 sm90)
set(folder_sm89 sm80)
set(folder_sm80 sm80)
set(fp8_sm90 "")
set(fp8_sm89 ", sm80::Fp8::kNative")
set(fp8_sm80 ", sm80::Fp8::kAsF16")
macro(fusedmoe_add_tiles family tiles file)
  if(${tiles} GREATER 0)
    set(folder ${folder_${family}})
    set(fp8 "${fp8_${family}}")
    set(launches "")
    math(EXPR last "${tiles} - 1")
    foreach(index RANGE ${last})
      string(APPEND launches "      &${folder}::launch_kernel<${policy}${fp8}, ${index}>,\n")
    endforeach()
    fusedmoe_add_kernels(${family} ${file} ${header} ${folder}/launch_kernel.cuh ${policy} [[
FormatLaunches @family@_@policy@() {
  static constexpr LaunchMlp kLaunches[] = {
@launches@  };
  static_assert(std::size(kLaunches) == @folder@::kernel_set(@policy@::kFormat@fp8@).tiles.size(),
                "cmake/FusedmoeKernels.cmake has another number");
  return {@policy@::kFormat.name, kLaunches};
}
]])
  endif()
endmacro()

while(operands)
  list(POP_FRONT operands header policy sm90_tiles sm80_tiles sm89_tiles one_token)
  get_filename_component(stem ${header} NAME_WE)
  fusedmoe_add_tiles(sm90 ${sm90_tiles} ${policy})
  fusedmoe_add_tiles(sm80 ${sm80_tiles} ${stem})
  fusedmoe_add_tiles(sm89 ${sm89_tiles} ${stem})
  if(one_token)
    fusedmoe_add_kernels(one_token ${stem} ${header} one_token/launch_one_token.cuh ${policy} [[
OneTokenKernel one_token_@policy@() {
  return {@policy@::kFormat.name, &launch_one_token<@policy@>};
}
]])
  endif()
endwhile()
foreach(family sm90 sm89 sm80 one_token)
  foreach(path IN LISTS FUSEDMOE_KERNELS_${family})
    get_filename_component(file ${path} NAME_WE)
    file(CONFIGURE OUTPUT ${path} CONTENT "${text_${family}_${file}}\n}  // namespace fusedmoe::cuda\n" @ONLY)
  endforeach()
endforeach()

# fusedmoe_write_table(<family> <type> <content>): `content` with @calls@ in a file that knows the
# functions of the family.
function(fusedmoe_write_table family type content)
  set(calls "")
  set(declarations "")
  foreach(policy IN LISTS policies_${family})
    string(APPEND declarations "${type} ${family}_${policy}();\n")
    string(APPEND calls "      ${family}_${policy}(),\n")
  endforeach()
  set(file ${kernels}/${family}/launches.cpp)
  file(CONFIGURE OUTPUT ${file} CONTENT "${content}" @ONLY)
  set(FUSEDMOE_KERNELS_${family} ${FUSEDMOE_KERNELS_${family}} ${file} PARENT_SCOPE)
endfunction()
foreach(family sm90 sm89 sm80)
  set(folder ${folder_${family}})
  fusedmoe_write_table(${family} FormatLaunches [[
#include "cuda/@folder@/family.h"

namespace fusedmoe::cuda {

@declarations@
std::span<const FormatLaunches> @family@_launches() {
  static const FormatLaunches all[] = {
@calls@  };
  return all;
}

}  // namespace fusedmoe::cuda
]])
endforeach()
fusedmoe_write_table(one_token OneTokenKernel [[
#include "cuda/one_token/one_token.h"

namespace fusedmoe::cuda {

@declarations@
OneTokenLaunch one_token_launch(const WeightFormat& format) {
  static const OneTokenKernel all[] = {
@calls@  };
  for (const OneTokenKernel& kernel : all) {
    if (kernel.format == format.name) return kernel.launch;
  }
  return nullptr;
}

}  // namespace fusedmoe::cuda
]])
