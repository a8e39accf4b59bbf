#!/usr/bin/env bash
# Installs, by name, the Debian packages that building and testing need and that are missing.
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
  "libspdlog-dev:spdlog/spdlog.h"
  "libdlpack-dev:dlpack/dlpack.h"
  "libgtest-dev:gtest/gtest.h"
)

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
[[ ${#missing[@]} -eq 0 ]] && exit 0

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
