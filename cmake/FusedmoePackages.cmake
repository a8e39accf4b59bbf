# Debian packages, by `cpack -G DEB` in the build folder: the libraries, what is needed to link with
# them, the program, and the Python package where FUSEDMOE_PYTHON_INSTALL_DIR says where it goes.
# scripts/release.sh sets the rest, as BUILD_SHARED_LIBS.
set(soversion ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set(CPACK_PACKAGE_NAME fusedmoe)
set(CPACK_PACKAGE_VENDOR fusedmoe)
set(CPACK_PACKAGE_CONTACT "fusedmoe maintainers <fusedmoe@users.noreply.github.com>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "")  # else the first line of each package's own
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

# describe(<component> <package> <section> <depends> <summary>). Each has the licence, where Debian has it.
macro(describe component package section depends summary)
  string(TOUPPER ${component} upper)
  list(APPEND CPACK_COMPONENTS_ALL ${component})
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${package})
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section})
  set(CPACK_DEBIAN_${upper}_PACKAGE_DEPENDS "${depends}")
  set(CPACK_DEBIAN_${upper}_DESCRIPTION "${PROJECT_DESCRIPTION}: ${summary}")
  if(CMAKE_INSTALL_PREFIX STREQUAL "/usr")
    install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION share/doc/${package}
      COMPONENT ${component} RENAME copyright)
    install(FILES ${PROJECT_SOURCE_DIR}/THIRD-PARTY.md DESTINATION share/doc/${package}
      COMPONENT ${component})
  endif()
endmacro()
describe(library libfusedmoe${soversion} libs "" "the libraries for C++ and C")
describe(development libfusedmoe-dev libdevel "libfusedmoe${soversion} (= ${PROJECT_VERSION})"
  "headers, CMake package and pkg-config files")
if(FUSEDMOE_BUILD_CLI)
  describe(program fusedmoe science "" "the program")
endif()
if(FUSEDMOE_PYTHON_INSTALL_DIR)
  math(EXPR next_minor "${Python_VERSION_MINOR} + 1")
  describe(python python3-fusedmoe python
    "python3 (>= ${Python_VERSION_MAJOR}.${Python_VERSION_MINOR}), python3 (<< ${Python_VERSION_MAJOR}.${next_minor})"
    "the Python package")
endif()
include(CPack)
