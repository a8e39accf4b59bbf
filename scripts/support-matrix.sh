#!/usr/bin/env bash
# Writes docs/support-matrix.md from the registry of the built program; with --check only compares.
# A program built without CUDA cannot answer for sm90: then the last column is not compared.
set -euo pipefail
cd "$(dirname "$0")/.."
program=${FUSEDMOE:-build/cli/fusedmoe}
page=docs/support-matrix.md

comparable() {
  if [[ $with_cuda == yes ]]; then cat; else sed -E 's/^(\|.*\|)[^|]*\|$/\1/'; fi
}

with_cuda=yes
if "$program" doctor | grep -q 'built without CUDA'; then with_cuda=no; fi
if [[ ${1-} == --check ]]; then
  diff -u <(comparable <"$page") <("$program" explain --matrix | comparable) || {
    echo "$page is stale: run scripts/support-matrix.sh" >&2
    exit 1
  }
elif [[ $with_cuda == no ]]; then
  echo "$program is built without CUDA and cannot answer for sm90" >&2
  exit 1
else
  "$program" explain --matrix >"$page"
fi
