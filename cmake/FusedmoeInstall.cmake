# Installs the library, its headers, the CMake package and the pkg-config file.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fusedmoe)
set(library fusedmoe_static)
if(BUILD_SHARED_LIBS)
  set(library fusedmoe_shared)
endif()
install(TARGETS ${library} fusedmoe_mpi EXPORT fusedmoeTargets
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(FUSEDMOE_BUILD_C)
  install(TARGETS fusedmoe_c EXPORT fusedmoeTargets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(FILES ${PROJECT_SOURCE_DIR}/include/fusedmoe.h
          ${PROJECT_SOURCE_DIR}/include/fusedmoe_quant.h ${PROJECT_SOURCE_DIR}/include/fusedmoe_ranks.h
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fusedmoe ${PROJECT_BINARY_DIR}/include/fusedmoe
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT fusedmoeTargets NAMESPACE fusedmoe:: DESTINATION ${package_dir})

foreach(flag BUILD_SHARED_LIBS FUSEDMOE_HAVE_CUDA FUSEDMOE_HAVE_MPI FUSEDMOE_BUILD_C)  # written into the config as ON or OFF
  if(${flag})
    set(${flag} ON)
  else()
    set(${flag} OFF)
  endif()
endforeach()
set(FUSEDMOE_MPI_LIBRARIES)
if(FUSEDMOE_HAVE_MPI)
  list(JOIN MPI_CXX_LIBRARIES " " FUSEDMOE_MPI_LIBRARIES)
endif()
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/fusedmoeConfig.cmake.in
  ${PROJECT_BINARY_DIR}/fusedmoeConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fusedmoeConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fusedmoeConfig.cmake
  ${PROJECT_BINARY_DIR}/fusedmoeConfigVersion.cmake DESTINATION ${package_dir})

set(FUSEDMOE_PC_LIBS)
if(NOT BUILD_SHARED_LIBS)
  set(FUSEDMOE_PC_LIBS " -pthread -lstdc++ -lm")
  if(FUSEDMOE_HAVE_CUDA)
    string(APPEND FUSEDMOE_PC_LIBS " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt -lpthread")
  endif()
endif()
file(RELATIVE_PATH FUSEDMOE_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${CMAKE_CURRENT_LIST_DIR}/fusedmoe.pc.in ${PROJECT_BINARY_DIR}/fusedmoe.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fusedmoe.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET fusedmoe_cli)
  install(TARGETS fusedmoe_cli)
endif()
