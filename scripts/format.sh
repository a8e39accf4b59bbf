#!/usr/bin/env bash
# Formats every source; with --check, only says which ones are not formatted, and fails.
set -euo pipefail
cd "$(dirname "$0")/.."
options=(-i)
[[ ${1:-} == --check ]] && options=(--dry-run --Werror)
git ls-files '*.h' '*.c' '*.cpp' '*.cu' '*.cuh' | xargs clang-format-14 "${options[@]}"
