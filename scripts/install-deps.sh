#!/usr/bin/env bash
# Installs, by name, the Debian packages that are missing:
#
#   scripts/install-deps.sh           what building and testing need; below .deps/ what the Python
#                                     package is built and tested with, and where nvcc is CUTLASS's headers
#   scripts/install-deps.sh demo      what the program needs to be built without CUDA
#   scripts/install-deps.sh release   for scripts/release.sh
#
# With everything there it only looks, and needs neither network nor rights. Without rights it says
# which packages are missing and goes on with what is there.
set -euo pipefail
purpose=${1:-test}

# package: a command or a file below an include folder that shows it is there
program=(
  "g++:g++"
  "cmake:cmake"
  "ninja-build:ninja"
  "make:make"
  "nlohmann-json3-dev:nlohmann/json.hpp"
  "libcli11-dev:CLI/CLI.hpp"
  "libfmt-dev:fmt/format.h"
)
tests=(
  "git:git"
  "pkgconf:pkg-config"
  "clang-format-14:clang-format-14"
  "zsh:zsh"
  "fish:fish"
  "man-db:man"
  "groff-base:groff"
  "libdlpack-dev:dlpack/dlpack.h"
  "libgtest-dev:gtest/gtest.h"
  "abigail-tools:abidiff"
  "python3-dev:python3-config"
  "python3-pip:pip3"
  "openmpi-bin:mpirun"
  "libopenmpi-dev:../lib/$(uname -m)-linux-gnu/openmpi/include/mpi.h"
)
release=(
  "git:git"
  "python3-dev:/usr/bin/python3-config"
  "python3-pip:pip3"
  "python3-venv:/usr/share/doc/python3-venv"
  "xz-utils:xz"
  "ccache:ccache"
  "dpkg-dev:dpkg-shlibdeps"
  "debootstrap:debootstrap"
)
case $purpose in
  demo) needed=("${program[@]}") ;;
  release) needed=("${program[@]}" "${release[@]}") ;;
  test) needed=("${program[@]}" "${tests[@]}") ;;
  *) echo "no such purpose: $purpose; there are: demo, release, test" >&2; exit 2 ;;
esac

present() {
  case "$1" in
    /*) [[ -e $1 ]] ;;
    */*) [[ -e "/usr/include/$1" || -e "/usr/local/include/$1" ]] ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

missing=()
for entry in "${needed[@]}"; do
  present "${entry#*:}" || missing+=("${entry%%:*}")
done

# fetch FOLDER PACKAGES...: what pip has, unpacked below .deps/ once. Needs no virtual environment.
fetch() {
  local folder=.deps/$1
  shift
  [[ ! -d $folder ]] || return 0
  echo "Installing: ${*#--no-deps}" >&2
  rm -rf .deps/unpacking
  python3 -m pip install --quiet --target .deps/unpacking "$@" 2>.deps/pip.log ||
    { cat .deps/pip.log >&2; return 1; }
  mv .deps/unpacking "$folder"
}

fetch_wheels() {
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  mkdir -p .deps
  fetch python nanobind==3.1.0 numpy==2.4.6 pytest==9.2.0 mypy==2.4.1 ml_dtypes==0.6.0 ||
    echo "Without these the Python package is neither built nor tested." >&2
  if command -v nvcc >/dev/null && [[ -z ${CUTLASS_ROOT:-} ]]; then
    fetch cutlass --no-deps nvidia-cutlass==4.2.0.0 ||
      echo "Without these headers only -DFUSEDMOE_CUDA=OFF builds." >&2
  fi
}

# Installs what is missing. Without apt-get, or the rights for it, says what that is; the build says
# itself what it cannot do without.
install_packages() {
  local as_root=()
  if ! command -v apt-get >/dev/null; then
    echo "No apt-get here: install these packages, or what corresponds to them: ${missing[*]}" >&2
    return
  fi
  if [[ $(id -u) -ne 0 ]]; then
    # Asks for a password where somebody can give it.
    if ! command -v sudo >/dev/null || ! { [[ -t 0 ]] && sudo -v || sudo -n true; } 2>/dev/null; then
      echo "No rights to install packages, going on without: ${missing[*]}" >&2
      echo "As root: apt-get install ${missing[*]}" >&2
      return
    fi
    as_root=(sudo)
  fi
  echo "Installing: ${missing[*]}" >&2
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

[[ ${#missing[@]} -eq 0 ]] || install_packages
[[ $purpose == demo ]] || fetch_wheels
