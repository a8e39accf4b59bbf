#!/usr/bin/env bash
# The C interface, include/fusedmoe.h and fusedmoe_*.h:
#
#   scripts/check-c-abi.sh build/src/libfusedmoe_c.so    checks it
#   scripts/check-c-abi.sh --update                      writes tests/capi/fusedmoe.abi again
#
# The library exports the functions of the header and nothing else. And, where abidiff is (Debian:
# abigail-tools), what a C caller sees of the header is what tests/capi/fusedmoe.abi says, but for
# additions. What it sees is the debug information of a library of empty functions.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${CC:-cc}" -std=c11 -E -P -Iinclude -include fusedmoe_quant.h -include fusedmoe_ranks.h \
  -include fusedmoe_hooks.h \
  include/fusedmoe_selection.h >"$work/header.c"
# Every declaration of a function becomes its definition.
tr '\n' ' ' <"$work/header.c" |
  sed -E 's/(__attribute__\(\(visibility\("default"\)\)\)[^;]*\)) *;/\1 { __builtin_trap(); }\n/g' \
    >"$work/empty.c"
"${CC:-cc}" -std=c11 -g -w -shared -fPIC -Wl,-soname,libfusedmoe_c.so -nostdlib \
  -ffile-prefix-map="$work=." -o "$work/libfusedmoe_c.so" "$work/empty.c"

functions() { nm --dynamic --defined-only "$1" | cut -d' ' -f3 | sort; }
[[ ${1:-} == --update ]] || diff <(functions "$work/libfusedmoe_c.so") <(functions "$1") ||
  { echo "$1: exports (>) are not the functions of the headers (<)" >&2; exit 1; }

command -v abidiff >/dev/null || { echo "no abidiff here: only names were compared"; exit 0; }
dump=tests/capi/fusedmoe.abi
options=(--no-corpus-path --no-comp-dir-path --no-show-locs --no-architecture --no-elf-needed)
if [[ ${1:-} == --update ]]; then
  abidw "${options[@]}" --out-file "$dump" "$work/libfusedmoe_c.so"
  exit
fi
abidiff --no-added-syms --no-show-locs --no-architecture "$dump" "$work/libfusedmoe_c.so" ||
  { echo "fusedmoe.h changes what programs were built with. Members at the end of a struct are" \
    "fine, all else needs a new version; then run $0 --update" >&2; exit 1; }
