# The header libraries that the build uses: those of the system or, where they are missing and
# FUSEDMOE_FETCH_DEPENDENCIES is on, the archives named here. It is on for `pip install .`, whose users
# need not know of them; distributors leave it off, so that a build downloads nothing.
option(FUSEDMOE_FETCH_DEPENDENCIES "Download header libraries that the system lacks" OFF)
set(FUSEDMOE_FMT fmt::fmt CACHE STRING "Our programs' fmt: fmt::fmt or fmt::fmt-header-only")

# fusedmoe_find(<package> <Debian's> <target> <folder of headers> <archive> <its SHA-256>). Of a
# downloaded one the headers alone are used: its own CMake files may be too old for the CMake here.
# FETCHCONTENT_SOURCE_DIR_<PACKAGE> names a folder to take instead of the archive.
function(fusedmoe_find package debian target headers url hash)
  find_package(${package} QUIET GLOBAL)
  if(TARGET ${target})
    return()
  endif()
  if(NOT FUSEDMOE_FETCH_DEPENDENCIES)
    message(FATAL_ERROR "${package} is not installed (Debian: ${debian}); "
      "-DFUSEDMOE_FETCH_DEPENDENCIES=ON downloads it.")
  endif()
  include(FetchContent)
  FetchContent_Declare(${package} URL ${url} URL_HASH SHA256=${hash} SOURCE_SUBDIR none)
  FetchContent_MakeAvailable(${package})
  string(TOLOWER ${package} lower)
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  target_include_directories(${target} INTERFACE ${${lower}_SOURCE_DIR}/${headers})
endfunction()

fusedmoe_find(fmt libfmt-dev fmt::fmt-header-only include
  https://github.com/fmtlib/fmt/archive/refs/tags/9.1.0.tar.gz
  5dea48d1fcddc3ec571ce2058e13910a0d4a6bab4cc09a809d8b1dd1c88ae6f2)
if(NOT TARGET fmt::fmt)
  target_compile_definitions(fmt::fmt-header-only INTERFACE FMT_HEADER_ONLY=1)
  set(FUSEDMOE_FMT fmt::fmt-header-only)
endif()
fusedmoe_find(nlohmann_json nlohmann-json3-dev nlohmann_json::nlohmann_json single_include
  https://github.com/nlohmann/json/archive/refs/tags/v3.11.2.tar.gz
  d69f9deb6a75e2580465c6c4c5111b89c4dc2fa94e3a85fcd2ffcd9a143d9273)
if(FUSEDMOE_BUILD_CLI)
  fusedmoe_find(CLI11 libcli11-dev CLI11::CLI11 include
    https://github.com/CLIUtils/CLI11/archive/refs/tags/v2.1.2.tar.gz
    26291377e892ba0e5b4972cdfd4a2ab3bf53af8dac1f4ea8fe0d1376b625c8cb)
endif()
