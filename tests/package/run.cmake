# cmake -DBUILD=<build tree of fusedmoe> -DSOURCE=<its sources> -DWORK=<scratch folder>
#       -DMODE=installed|fetched -DGENERATOR=<generator> -P run.cmake
# installed: installs into WORK/prefix, then configures, builds and runs the consumer, also by way
# of pkg-config. fetched: configures the consumer with the sources as a part of it.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "exit status ${result}: ${ARGV}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(configure ${CMAKE_COMMAND} -S ${SOURCE}/tests/package -B ${WORK}/build -G ${GENERATOR})
if(MODE STREQUAL "fetched")
  run(${configure} -DFUSEDMOE_SOURCE_DIR=${SOURCE})
  return()
endif()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
run(${configure} -DCMAKE_PREFIX_PATH=${WORK}/prefix)
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer)
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
