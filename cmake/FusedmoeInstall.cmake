# Installs the library, its headers, the CMake package and the pkg-config files, the program. The
# components are those of the Debian packages (FusedmoePackages.cmake).
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fusedmoe)
set(library fusedmoe_static)
if(BUILD_SHARED_LIBS)
  set(library fusedmoe_shared)
endif()
# install_libraries(<export set> <targets>...): what runs apart from what is linked with.
function(install_libraries set)
  install(TARGETS ${ARGN} EXPORT ${set}
    LIBRARY COMPONENT library NAMELINK_COMPONENT development ARCHIVE COMPONENT development
    INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT ${set} NAMESPACE fusedmoe:: DESTINATION ${package_dir} COMPONENT development)
endfunction()
install_libraries(fusedmoeTargets ${library} fusedmoe_mpi)
if(FUSEDMOE_BUILD_C)
  install_libraries(fusedmoeCTargets fusedmoe_c)
  install(FILES ${PROJECT_SOURCE_DIR}/include/fusedmoe.h
          ${PROJECT_SOURCE_DIR}/include/fusedmoe_quant.h ${PROJECT_SOURCE_DIR}/include/fusedmoe_ranks.h
          ${PROJECT_SOURCE_DIR}/include/fusedmoe_selection.h ${PROJECT_SOURCE_DIR}/include/fusedmoe_hooks.h
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fusedmoe DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT development FILES_MATCHING PATTERN "*.h")

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
  ${PROJECT_BINARY_DIR}/fusedmoeConfigVersion.cmake DESTINATION ${package_dir} COMPONENT development)

# install_pc(<library> <what it is> <what a static one is linked with>)
function(install_pc name description libraries)
  file(RELATIVE_PATH prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/fusedmoe.pc.in ${PROJECT_BINARY_DIR}/${name}.pc
    @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
    COMPONENT development)
endfunction()
set(static_libraries)
if(NOT BUILD_SHARED_LIBS)
  set(static_libraries " -pthread -lstdc++ -lm")
  if(FUSEDMOE_HAVE_CUDA)
    string(APPEND static_libraries
      " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt -lpthread")
  endif()
endif()
install_pc(fusedmoe "${PROJECT_DESCRIPTION}" "${static_libraries}")
if(FUSEDMOE_BUILD_C)
  install_pc(fusedmoe_c "${PROJECT_DESCRIPTION}, in C" "")
endif()

if(NOT CMAKE_INSTALL_PREFIX STREQUAL "/usr")  # Debian's packages have one each
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/THIRD-PARTY.md
    DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)
endif()
if(TARGET fusedmoe_cli)
  install(TARGETS fusedmoe_cli COMPONENT program)
  fusedmoe_install_manual(${CMAKE_INSTALL_DATADIR} program)
endif()
