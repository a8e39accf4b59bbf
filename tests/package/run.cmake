# cmake -DBUILD=<build tree of fusedmoe> -DSOURCE=<its sources> -DWORK=<scratch folder>
#       -DMODE=installed|fetched|cuda -DGENERATOR=<generator> -P run.cmake
# installed: installs into WORK/prefix, then configures, builds and runs the consumer, also by way
# of pkg-config. fetched: configures the consumer with the sources as a part of it. cuda: the same
# with CUDA, while the consumer and the environment name other architectures; compiles no kernel.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "exit status ${result}: ${ARGV}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(configure ${CMAKE_COMMAND} -S ${SOURCE}/tests/package -G ${GENERATOR})
if(MODE STREQUAL "fetched")
  run(${configure} -B ${WORK}/build -DFUSEDMOE_SOURCE_DIR=${SOURCE})
  return()
endif()

# expect(<pattern> <command>...): the command succeeds or fails, but says so.
function(expect pattern)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE out ERROR_VARIABLE out RESULT_VARIABLE result)
  if(NOT out MATCHES "${pattern}")
    message(FATAL_ERROR "no \"${pattern}\" in the output of ${ARGN}, exit status ${result}:\n${out}")
  endif()
endfunction()

if(MODE STREQUAL "cuda")
  set(ENV{CUDAARCHS} 80)
  list(APPEND configure -DFUSEDMOE_SOURCE_DIR=${SOURCE} -DFUSEDMOE_CUDA=ON ${CUDA_OPTIONS})
  expect("CUDA architectures: fusedmoe 90a-real, others 75" ${configure} -B ${WORK}/other
    -DLANGUAGES=CUDA -DCMAKE_CUDA_ARCHITECTURES=75)
  expect("CUDA architectures: fusedmoe 90a-real" ${configure} -B ${WORK}/build
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
  file(STRINGS ${WORK}/build/compile_commands.json flags REGEX "arch=")
  list(FILTER flags EXCLUDE REGEX "arch=compute_90a,code=.*sm_90a")
  if(flags)
    message(FATAL_ERROR "kernels for other architectures: ${flags}")
  endif()
  return()
endif()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
list(APPEND configure -DCMAKE_PREFIX_PATH=${WORK}/prefix)
expect("fusedmoe has no component \"nonsense\"; there are: c, mpi" ${configure}
  -B ${WORK}/nonsense -DCOMPONENTS=nonsense)
if(HAVE_MPI)
  run(${configure} -B ${WORK}/build -DWITH_MPI=ON -DCOMPONENTS=mpi)
else()
  expect("component mpi: this fusedmoe was built without MPI" ${configure} -B ${WORK}/build
    -DCOMPONENTS=mpi)
  run(${configure} -B ${WORK}/build -DWITH_MPI=ON -DCOMPONENTS=)  # a library that says so
endif()
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer)
run(${WORK}/build/consumer_mpi)
if(EXISTS ${WORK}/prefix/include/fusedmoe.h)
  run(${WORK}/build/consumer_c)
endif()

find_program(pkg_config pkg-config)
if(pkg_config)
  file(GLOB_RECURSE pc_file ${WORK}/prefix/fusedmoe.pc)
  execute_process(COMMAND ${pkg_config} --cflags --libs ${pc_file}
    OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  cmake_path(GET pc_file PARENT_PATH library_dir)
  cmake_path(GET library_dir PARENT_PATH library_dir)
  run(${COMPILER} -std=c++20 ${SOURCE}/tests/package/consumer.cpp -o ${WORK}/consumer_pc ${flags}
    -Wl,-rpath,${library_dir})
  run(${WORK}/consumer_pc)
endif()
