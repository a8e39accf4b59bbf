#!/usr/bin/env bash
# The objects of the CPU's levels (src/cpu/isa_*.cpp) hold no weak function:
#
#   scripts/check-levels.sh build/src/CMakeFiles/fusedmoe_host.dir/cpu/isa_*.o
#
# An inline function that the compiler did not inline is weak. Where several objects hold the same
# one, the linker keeps a single copy. It may keep the copy with AVX-512 instructions, and then the
# whole library calls that one, on processors without AVX-512 too. Such a function has to be in an
# anonymous namespace or static. NM names another nm.
set -euo pipefail
[[ $# -gt 0 ]] || { echo "usage: $0 OBJECT..." >&2; exit 2; }
for object in "$@"; do
  symbols=$("${NM:-nm}" --demangle "$object")
  grep -q ' T .*_kernels()' <<<"$symbols" || { echo "$object is not an object of a level" >&2; exit 1; }
  weak=$(grep ' W ' <<<"$symbols" || true)
  [[ -z $weak ]] || { printf '%s\n' "$object holds weak functions:" "$weak" >&2; exit 1; }
done
