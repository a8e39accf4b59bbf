# Sets FUSEDMOE_HAVE_CUDA from FUSEDMOE_CUDA (ON, OFF, AUTO) and, with CUDA, enables the language
# and finds CUTLASS's headers: in CUTLASS_ROOT, where scripts/install-deps.sh unpacks the
# nvidia-cutlass wheel, or where pip puts it to build ours. AUTO is ON where nvcc is. Without the
# headers both fail: nobody gets a library without CUDA by surprise.
#
# FUSEDMOE_CUDA_ARCHS are the compute capabilities that there is machine code for, 90a among them, and
# 80, whose PTX the driver compiles for GPUs that are not in the list. From it come
# FUSEDMOE_CUDA_ARCHITECTURES, the property CUDA_ARCHITECTURES of every target with kernels, and those
# of the folders sm80 and sm90, whatever a project around this one, CMAKE_CUDA_ARCHITECTURES or
# CUDAARCHS say for others.
set(FUSEDMOE_CUDA_ARCHS "80;90a" CACHE STRING "Compute capabilities to compile kernels for")
set(CUTLASS_ROOT "" CACHE PATH "Folder with include/cute and include/cutlass; default: the wheel's")

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
  foreach(needed 80 90a)
    if(NOT needed IN_LIST FUSEDMOE_CUDA_ARCHS)
      message(FATAL_ERROR "FUSEDMOE_CUDA_ARCHS is ${FUSEDMOE_CUDA_ARCHS}; it must name ${needed}.")
    endif()
  endforeach()
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
list(TRANSFORM architectures APPEND -real OUTPUT_VARIABLE FUSEDMOE_CUDA_ARCHITECTURES)
list(APPEND FUSEDMOE_CUDA_ARCHITECTURES 80-virtual)
set(FUSEDMOE_CUDA_ARCHITECTURES_sm90 90a-real)
set(FUSEDMOE_CUDA_ARCHITECTURES_sm80 ${FUSEDMOE_CUDA_ARCHITECTURES})
list(REMOVE_ITEM FUSEDMOE_CUDA_ARCHITECTURES_sm80 90a-real)

# What src/cuda/sm*/family.cpp says of them.
set(FUSEDMOE_ARCHITECTURES)
foreach(folder SM90 SM80)
  string(TOLOWER ${folder} family)
  list(JOIN FUSEDMOE_CUDA_ARCHITECTURES_${family} " " names)
  list(APPEND FUSEDMOE_ARCHITECTURES
    "$<$<COMPILE_LANGUAGE:CXX>:FUSEDMOE_${folder}_ARCHITECTURES=\"${names}\">")
endforeach()
