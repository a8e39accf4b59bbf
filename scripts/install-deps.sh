#!/usr/bin/env bash
# Installs, by name, the Debian packages that building and testing need and that are missing, and
# where nvcc is the headers of CUTLASS.
# With everything there it only looks, and needs neither network nor rights.
set -euo pipefail

# package: a command or a file below an include folder that shows it is there
needed=(
  "g++:g++"
  "cmake:cmake"
  "ninja-build:ninja"
  "make:make"
  "git:git"
  "pkgconf:pkg-config"
  "clang-format-14:clang-format-14"
  "nlohmann-json3-dev:nlohmann/json.hpp"
  "libcli11-dev:CLI/CLI.hpp"
  "libfmt-dev:fmt/format.h"
  "libdlpack-dev:dlpack/dlpack.h"
  "libgtest-dev:gtest/gtest.h"
  "abigail-tools:abidiff"
)
command -v nvcc >/dev/null && needed+=("python3-pip:pip3")

present() {
  case "$1" in
    */*) [[ -e "/usr/include/$1" || -e "/usr/local/include/$1" ]] ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

missing=()
for entry in "${needed[@]}"; do
  present "${entry#*:}" || missing+=("${entry%%:*}")
done

# CUTLASS's headers, where there is a CUDA compiler: the wheel, unpacked below .deps/.
cutlass=nvidia-cutlass==4.2.0.0
fetch_cutlass() {
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  command -v nvcc >/dev/null || return 0
  [[ -z ${CUTLASS_ROOT:-} && ! -d .deps/cutlass ]] || return 0
  echo "Installing: $cutlass" >&2
  rm -rf .deps/unpacking
  python3 -m pip install --quiet --no-deps --target .deps/unpacking "$cutlass" 2>.deps/pip.log ||
    { cat .deps/pip.log >&2; return 1; }
  mv .deps/unpacking .deps/cutlass
}
mkdir -p "$(dirname "$0")/../.deps"
if [[ ${#missing[@]} -eq 0 ]]; then
  fetch_cutlass
  exit
fi

echo "Installing: ${missing[*]}" >&2
if ! command -v apt-get >/dev/null; then
  echo "No apt-get here: install these packages, or what corresponds to them, yourself." >&2
  exit 1
fi
as_root=()
[[ $(id -u) -eq 0 ]] || as_root=(sudo)
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}"
fetch_cutlass
