# Sets FUSEDMOE_HAVE_CUDA from FUSEDMOE_CUDA (ON, OFF, AUTO) and, with CUDA, enables the language
# and finds CUTLASS's headers: in CUTLASS_ROOT, or where scripts/install-deps.sh unpacks the
# nvidia-cutlass wheel. AUTO needs nvcc and them; ON fails without. FUSEDMOE_CUDA_ARCHITECTURES is
# the property CUDA_ARCHITECTURES of every target with kernels, whatever a project around this one,
# CMAKE_CUDA_ARCHITECTURES or CUDAARCHS say for others.
set(CUTLASS_ROOT "" CACHE PATH "Folder with include/cute and include/cutlass; default: the wheel's")

set(FUSEDMOE_HAVE_CUDA OFF)
if(FUSEDMOE_CUDA)
  find_path(FUSEDMOE_CUTLASS_INCLUDE_DIR cute/tensor.hpp
    HINTS ${CUTLASS_ROOT} $ENV{CUTLASS_ROOT} ${PROJECT_SOURCE_DIR}/.deps/cutlass
    PATH_SUFFIXES include cutlass_library/source/include)
  if(FUSEDMOE_CUDA STREQUAL "AUTO")
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER AND FUSEDMOE_CUTLASS_INCLUDE_DIR)
      set(FUSEDMOE_HAVE_CUDA ON)
    elseif(CMAKE_CUDA_COMPILER)
      message(WARNING "nvcc is here but CUTLASS's headers are not: building without CUDA. "
        "scripts/install-deps.sh fetches them; CUTLASS_ROOT names another copy.")
    endif()
  else()
    set(FUSEDMOE_HAVE_CUDA ON)
    if(NOT FUSEDMOE_CUTLASS_INCLUDE_DIR)
      message(FATAL_ERROR "FUSEDMOE_CUDA=ON needs CUTLASS's headers: run scripts/install-deps.sh, "
        "or set CUTLASS_ROOT.")
    endif()
  endif()
endif()

if(FUSEDMOE_HAVE_CUDA)
  # Machine code for Hopper alone: no PTX that a driver would have to compile at start.
  set(FUSEDMOE_CUDA_ARCHITECTURES 90a-real)
  if(NOT CMAKE_CUDA_COMPILER_LOADED)
    # With what the compiler is tried: else the environment may name what it does not know.
    set(CMAKE_CUDA_ARCHITECTURES ${FUSEDMOE_CUDA_ARCHITECTURES})
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()
