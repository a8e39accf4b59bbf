# cmake -DBUILD=<build tree of fusedmoe> -DSOURCE=<its sources> -DWORK=<scratch folder>
#       -DMODE=installed|fetched|cuda|missing -DGENERATOR=<generator> -DVERSION=<version> -P run.cmake
# installed: installs into WORK/prefix, then configures, builds and runs the consumer, also by way
# of pkg-config. fetched: configures the consumer with the sources as a part of it. cuda: the same
# with CUDA, while the consumer and the environment name other architectures; compiles no kernel.
# missing: configures the sources where what the build needs is not, and expects one sentence.
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

if(MODE STREQUAL "missing")
  # A copy without .deps/, where CUTLASS's headers would be found.
  file(MAKE_DIRECTORY ${WORK}/source)
  foreach(part CMakeLists.txt cmake cli include python src LICENSE THIRD-PARTY.md)
    file(CREATE_LINK ${SOURCE}/${part} ${WORK}/source/${part} SYMBOLIC)
  endforeach()
  set(configure ${CMAKE_COMMAND} -S ${WORK}/source -G ${GENERATOR} -DFUSEDMOE_BUILD_TESTS=OFF
    -DFUSEDMOE_PYTHON=OFF -DFUSEDMOE_MPI=OFF)
  foreach(cuda ON AUTO)  # AUTO asks for a compiler of CUDA alone, so anything passes for one
    expect("CUTLASS's headers are.missing.*FUSEDMOE_CUDA=OFF" ${configure} -B ${WORK}/cutlass-${cuda}
      -DFUSEDMOE_CUDA=${cuda} -DCMAKE_CUDA_COMPILER=${CMAKE_COMMAND})
  endforeach()
  # Where pip puts the wheel that is a requirement of the build.
  set(site ${WORK}/site/cutlass_library/source/include)
  file(WRITE ${site}/cute/tensor.hpp "")
  expect("CUDA" ${configure} -B ${WORK}/site-packages -DFUSEDMOE_CUDA=ON
    -DCMAKE_CUDA_COMPILER=${CMAKE_COMMAND} -DCMAKE_PREFIX_PATH=${WORK}/site)
  file(STRINGS ${WORK}/site-packages/CMakeCache.txt found REGEX "^FUSEDMOE_CUTLASS_INCLUDE_DIR:")
  if(NOT found MATCHES "=${site}$")
    message(FATAL_ERROR "CUTLASS's headers are not found in the wheel: ${found}")
  endif()
  list(APPEND configure -DFUSEDMOE_CUDA=OFF)
  foreach(package fmt nlohmann_json CLI11)
    set(missing -DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON)
    expect("${package} is not installed.*FUSEDMOE_FETCH_DEPENDENCIES=ON" ${configure} ${missing}
      -B ${WORK}/${package})
    list(APPEND all_missing ${missing})
  endforeach()
  # Downloaded ones are folders here. What they declare is enough to generate all targets.
  expect("Generating done" ${configure} ${all_missing} -B ${WORK}/fetched
    -DFUSEDMOE_FETCH_DEPENDENCIES=ON -DFETCHCONTENT_SOURCE_DIR_FMT=${SOURCE}
    -DFETCHCONTENT_SOURCE_DIR_NLOHMANN_JSON=${SOURCE} -DFETCHCONTENT_SOURCE_DIR_CLI11=${SOURCE})
  return()
endif()

if(MODE STREQUAL "cuda")
  set(ENV{CUDAARCHS} 86)
  list(APPEND configure -DFUSEDMOE_SOURCE_DIR=${SOURCE} -DFUSEDMOE_CUDA=ON ${CUDA_OPTIONS})
  expect("CUDA architectures: fusedmoe 80-real 90a-real 80-virtual, others 75" ${configure} -B ${WORK}/other
    -DLANGUAGES=CUDA -DCMAKE_CUDA_ARCHITECTURES=75)
  expect("CUDA architectures: fusedmoe 80-real 90a-real 80-virtual" ${configure} -B ${WORK}/build
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
  file(STRINGS ${WORK}/build/compile_commands.json flags REGEX "arch=")
  list(FILTER flags INCLUDE REGEX "arch=compute_(75|86)")
  if(flags)
    message(FATAL_ERROR "kernels for other architectures: ${flags}")
  endif()
  return()
endif()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
list(APPEND configure -DCMAKE_PREFIX_PATH=${WORK}/prefix -DVERSION=${VERSION})
if(EXISTS ${WORK}/prefix/bin/fusedmoe)
  foreach(file man/man1/fusedmoe.1 bash-completion/completions/fusedmoe
      zsh/site-functions/_fusedmoe fish/vendor_completions.d/fusedmoe.fish)
    if(NOT EXISTS ${WORK}/prefix/share/${file})
      message(FATAL_ERROR "share/${file} is not installed")
    endif()
  endforeach()
endif()
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

# The block of README.md, in a project that has a program.
file(READ ${SOURCE}/README.md readme)
string(REGEX MATCH "```cmake\n([^`]*)```" found "${readme}")
file(WRITE ${WORK}/readme/CMakeLists.txt
  "cmake_minimum_required(VERSION 3.25)\nproject(app LANGUAGES CXX)\n"
  "add_executable(app app.cpp)\n${CMAKE_MATCH_1}")
file(COPY_FILE ${SOURCE}/tests/package/consumer.cpp ${WORK}/readme/app.cpp)
run(${CMAKE_COMMAND} -S ${WORK}/readme -B ${WORK}/readme/build -G ${GENERATOR}
  -DCMAKE_PREFIX_PATH=${WORK}/prefix)

# Who asks for the C library alone finds nothing that a static C++ library would need, as
# CUDAToolkit in a build with CUDA; here it is Threads.
list(APPEND configure -DCMAKE_DISABLE_FIND_PACKAGE_Threads=ON)
if(EXISTS ${WORK}/prefix/include/fusedmoe.h)
  run(${configure} -B ${WORK}/c -DCOMPONENTS=c)
  run(${CMAKE_COMMAND} --build ${WORK}/c)
  run(${WORK}/c/consumer_c)
endif()
if(NOT SHARED)
  expect("Threads" ${configure} -B ${WORK}/static)
endif()

# pc(<module> <options>...): a program by way of pkg-config.
find_program(pkg_config pkg-config)
function(pc module)
  file(GLOB_RECURSE pc_file ${WORK}/prefix/${module}.pc)
  execute_process(COMMAND ${pkg_config} --cflags --libs ${pc_file}
    OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  cmake_path(GET pc_file PARENT_PATH library_dir)
  cmake_path(GET library_dir PARENT_PATH library_dir)
  run(${COMPILER} ${ARGN} -o ${WORK}/${module}_pc ${flags} -Wl,-rpath,${library_dir})
  run(${WORK}/${module}_pc)
endfunction()
if(pkg_config)
  pc(fusedmoe -std=c++20 ${SOURCE}/tests/package/consumer.cpp)
  if(EXISTS ${WORK}/prefix/include/fusedmoe.h)
    pc(fusedmoe_c -x c -std=c11 ${SOURCE}/tests/package/consumer_c.c -x none)
  endif()
endif()
