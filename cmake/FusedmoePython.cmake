# Sets FUSEDMOE_HAVE_PYTHON from FUSEDMOE_PYTHON (ON, OFF, AUTO): AUTO needs Python's headers and
# nanobind, installed or in .deps/python, where scripts/install-deps.sh puts it; ON fails without.
set(FUSEDMOE_HAVE_PYTHON OFF)
if(FUSEDMOE_PYTHON)
  set(required)
  if(NOT FUSEDMOE_PYTHON STREQUAL "AUTO")
    set(required REQUIRED)
  endif()
  set(Python_FIND_STRATEGY LOCATION)  # the first on the PATH, for which .deps/python was made
  # pip names one more component where the wheel is for the stable ABI.
  find_package(Python 3.10 ${required} COMPONENTS Interpreter Development.Module
    ${SKBUILD_SABI_COMPONENT})
  set(FUSEDMOE_PYTHON_DEPS ${PROJECT_SOURCE_DIR}/.deps/python)
  if(Python_Development.Module_FOUND)
    execute_process(COMMAND ${CMAKE_COMMAND} -E env PYTHONPATH=${FUSEDMOE_PYTHON_DEPS}
      ${Python_EXECUTABLE} -m nanobind --cmake_dir
      OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_package(nanobind CONFIG ${required} QUIET)
  endif()
  if(nanobind_FOUND)
    set(FUSEDMOE_HAVE_PYTHON ON)
  endif()
endif()
