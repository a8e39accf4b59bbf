#!/usr/bin/env bash
# The shared library exports the public interface and nothing else:
#
#   scripts/check-symbols.sh build/src/libfusedmoe.so
#
# Prints each other symbol, and fails; fails too where nothing is exported.
set -euo pipefail
inside='core|quant|files|checkpoint|moe|reference|cpu|cuda|comm|layer|tools|testing'
symbols=$(nm --dynamic --defined-only --demangle "$1" | cut -d' ' -f3-)
grep -q '^fusedmoe::' <<<"$symbols" || { echo "$1 exports nothing" >&2; exit 1; }
others=$(sed -E 's/^(typeinfo( name)?|vtable|VTT) for //' <<<"$symbols" |
  grep -vE '^fusedmoe(::|_)' || true)
others+=$(sed -E 's/^(typeinfo( name)?|vtable|VTT) for //' <<<"$symbols" |
  grep -E "^fusedmoe::($inside)::|[(]anonymous" || true)
[[ -z $others ]] || { printf '%s\n' "exported although not public:" "$others" >&2; exit 1; }
