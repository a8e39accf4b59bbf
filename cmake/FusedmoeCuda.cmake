# Sets FUSEDMOE_HAVE_CUDA from FUSEDMOE_CUDA (ON, OFF, AUTO) and, with CUDA, enables the language
# and finds CUTLASS's headers: in CUTLASS_ROOT, where scripts/install-deps.sh unpacks the
# nvidia-cutlass wheel, or where pip puts it to build ours. AUTO is ON where nvcc is. Without the
# headers both fail: nobody gets a library without CUDA by surprise.
#
# FUSEDMOE_CUDA_ARCHS are the compute capabilities that there is machine code for. Three are required:
# 80, whose PTX the driver compiles for GPUs that are not in the list; 89, for which only the FP8
# kernels are compiled (sm89); and 90a (sm90). From it come FUSEDMOE_CUDA_ARCHITECTURES, the property CUDA_ARCHITECTURES of every target
# with kernels, and those of the families sm80, sm89 and sm90, whatever a project around this one,
# CMAKE_CUDA_ARCHITECTURES or CUDAARCHS say for others.
set(FUSEDMOE_CUDA_ARCHS "80;89;90a" CACHE STRING "Compute capabilities to compile kernels for")
# Never in what others get: a GPU of 9.0 or 10.x would run it, slowly.
option(FUSEDMOE_TEST_PTX_89 "PTX of the FP8 kernels of 8.9, to test them on a later GPU" OFF)
set(CUTLASS_ROOT "" CACHE PATH "Folder with include/cute and include/cutlass; default: the wheel's")

foreach(needed 80 89 90a)
  if(NOT needed IN_LIST FUSEDMOE_CUDA_ARCHS)
    message(FATAL_ERROR "FUSEDMOE_CUDA_ARCHS is ${FUSEDMOE_CUDA_ARCHS}; it must name ${needed}. A build "
      "folder may remember an older default: -U FUSEDMOE_CUDA_ARCHS.")
  endif()
endforeach()
set(FUSEDMOE_HAVE_CUDA ${FUSEDMOE_CUDA})
if(FUSEDMOE_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  set(FUSEDMOE_HAVE_CUDA OFF)
  if(CMAKE_CUDA_COMPILER)
    set(FUSEDMOE_HAVE_CUDA ON)
  endif()
endif()

if(FUSEDMOE_HAVE_CUDA)
  find_path(FUSEDMOE_CUTLASS_INCLUDE_DIR cute/tensor.hpp
    HINTS ${CUTLASS_ROOT} $ENV{CUTLASS_ROOT} ${PROJECT_SOURCE_DIR}/.deps/cutlass ${CMAKE_PREFIX_PATH}
    PATH_SUFFIXES include cutlass_library/source/include)
  if(NOT FUSEDMOE_CUTLASS_INCLUDE_DIR)
    message(FATAL_ERROR "nvcc is used but CUTLASS's headers are missing: run scripts/install-deps.sh, "
      "name a copy by CUTLASS_ROOT, or build without CUDA by -DFUSEDMOE_CUDA=OFF "
      "(pip: -C cmake.define.FUSEDMOE_CUDA=OFF).")
  endif()
  if(NOT CMAKE_CUDA_COMPILER_LOADED)
    # With what the compiler is tried: else the environment may name what it does not know.
    set(CMAKE_CUDA_ARCHITECTURES 80-real)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

# A build without CUDA tells what one with it would run.
set(architectures ${FUSEDMOE_CUDA_ARCHS})
if(FUSEDMOE_HAVE_CUDA AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  list(FILTER architectures EXCLUDE REGEX "^1[0-9][0-9]")
  if(NOT architectures STREQUAL FUSEDMOE_CUDA_ARCHS)
    message(STATUS "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.8, so there is no machine "
      "code for Blackwell: machine code for ${architectures}")
  endif()
endif()
list(TRANSFORM architectures APPEND -real)
set(FUSEDMOE_CUDA_ARCHITECTURES ${architectures} 80-virtual)
list(REMOVE_ITEM FUSEDMOE_CUDA_ARCHITECTURES 89-real)
set(FUSEDMOE_CUDA_ARCHITECTURES_sm90 90a-real)
set(FUSEDMOE_CUDA_ARCHITECTURES_sm89 ${architectures})
list(FILTER FUSEDMOE_CUDA_ARCHITECTURES_sm89 INCLUDE REGEX "^(89|12[0-9])")
if(FUSEDMOE_TEST_PTX_89)
  list(APPEND FUSEDMOE_CUDA_ARCHITECTURES_sm89 89-virtual)
endif()
set(FUSEDMOE_CUDA_ARCHITECTURES_sm80 ${FUSEDMOE_CUDA_ARCHITECTURES})
list(REMOVE_ITEM FUSEDMOE_CUDA_ARCHITECTURES_sm80 90a-real)

# What src/cuda/sm*/family.cpp says of them.
set(FUSEDMOE_ARCHITECTURES)
foreach(family sm90 sm89 sm80)
  string(TOUPPER ${family} name)
  list(JOIN FUSEDMOE_CUDA_ARCHITECTURES_${family} " " architectures)
  list(APPEND FUSEDMOE_ARCHITECTURES
    "$<$<COMPILE_LANGUAGE:CXX>:FUSEDMOE_${name}_ARCHITECTURES=\"${architectures}\">")
endforeach()
