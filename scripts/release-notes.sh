#!/usr/bin/env bash
# What CHANGELOG.md says of the version of include/fusedmoe/version.h; fails where it says nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -nE 's/#define FUSEDMOE_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)/\2/p' \
  include/fusedmoe/version.h | paste -sd.)
notes=$(awk -v heading="## $version" '
  /^## / { inside = index($0, heading) == 1; next }
  inside' CHANGELOG.md)
[[ -n ${notes//[[:space:]]/} ]] || { echo "CHANGELOG.md has no part \"## $version\"" >&2; exit 1; }
printf '# fusedmoe %s\n%s\n' "$version" "$notes"
