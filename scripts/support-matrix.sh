#!/usr/bin/env bash
# Writes docs/support-matrix.md from the registry of the built program, with or without CUDA; with
# --check only compares.
set -euo pipefail
cd "$(dirname "$0")/.."
program=${FUSEDMOE:-build/cli/fusedmoe}
page=docs/support-matrix.md

print_page() { "$program" explain --matrix | scripts/support_matrix.py; }

if [[ ${1-} == --check ]]; then
  diff -u "$page" <(print_page) || {
    echo "$page is stale: run scripts/support-matrix.sh" >&2
    exit 1
  }
else
  print_page >"$page.new"
  mv "$page.new" "$page"
fi
