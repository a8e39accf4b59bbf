#!/usr/bin/env bash
# scripts/install-deps.sh for a user without rights: it names what is missing and goes on.
# Arguments: SOURCE_DIR WORK_DIR
set -euo pipefail
source=$1 work=$2
rm -rf "$work"
mkdir -p "$work/bin" "$work/scripts" "$work/.deps/python" "$work/.deps/cutlass"
cp "$source/scripts/install-deps.sh" "$work/scripts/"
for tool in bash dirname uname mkdir cat; do ln -s "$(command -v $tool)" "$work/bin/$tool"; done
printf '#!/bin/sh\necho 1000\n' >"$work/bin/id"
printf '#!/bin/sh\necho called >>"%s/called"\n' "$work" >"$work/bin/apt-get"
chmod +x "$work/bin/id" "$work/bin/apt-get"

expect() {  # PATTERN [PURPOSE]
  PATH=$work/bin "$work/bin/bash" "$work/scripts/install-deps.sh" "${@:2}" >"$work/out" 2>&1 ||
    { echo "FAILED: exit status $?"; cat "$work/out"; exit 1; }
  grep -q -- "$1" "$work/out" || { echo "FAILED: no '$1'"; cat "$work/out"; exit 1; }
  [[ ! -e $work/called ]] || { echo "FAILED: apt-get was called"; exit 1; }
}
expect '^As root: apt-get install .*cmake ninja-build.*clang-format-14'
# The demo needs neither MPI nor what tests and pip's packages need.
expect '^As root: apt-get install g++ cmake ninja-build make' demo
! grep -qE 'mpi|clang-format|python|gtest' "$work/out" ||
  { echo "FAILED: more than the demo needs"; cat "$work/out"; exit 1; }
# sudo that wants a password, and nobody there to type it.
printf '#!/bin/sh\nexit 1\n' >"$work/bin/sudo"
chmod +x "$work/bin/sudo"
expect '^No rights to install packages, going on without: .*cmake' </dev/null
rm "$work/bin/apt-get"
expect '^No apt-get here: install these packages, .*cmake'
