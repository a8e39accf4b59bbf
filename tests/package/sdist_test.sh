#!/usr/bin/env bash
# What pip leaves out of a source archive is named from the root, else folders of the same name deeper
# down, as cli/bench, would be left out too. Argument: SOURCE_DIR
set -euo pipefail
excluded=$(sed -n 's/^sdist\.exclude = //p' "$1/pyproject.toml" | grep -o '"[^"]*"')
! grep -v '^"/' <<<"$excluded" || { echo "FAILED: these are found in any folder"; exit 1; }
