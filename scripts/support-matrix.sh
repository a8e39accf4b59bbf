#!/usr/bin/env bash
# Writes docs/support-matrix.md from the registry of the built program, with or without CUDA; with
# --check only compares.
set -euo pipefail
cd "$(dirname "$0")/.."
program=${FUSEDMOE:-build/cli/fusedmoe}
page=docs/support-matrix.md

if [[ ${1-} == --check ]]; then
  diff -u "$page" <("$program" explain --matrix) || {
    echo "$page is stale: run scripts/support-matrix.sh" >&2
    exit 1
  }
else
  "$program" explain --matrix >"$page"
fi
