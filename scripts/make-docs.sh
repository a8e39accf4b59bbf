#!/usr/bin/env bash
# Builds the site into build/site: the pages of docs/, the Python reference, and Doxygen's reference
# of the C++ and C headers. Needs doxygen and the package in build/python; MkDocs comes from pip.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v doxygen >/dev/null || { echo "make docs needs doxygen (Debian: doxygen)" >&2; exit 1; }
if [[ ! -d .deps/docs ]]; then
  python3 -m pip install --quiet --target .deps/docs-unpacking \
    mkdocs==1.6.1 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11
  mv .deps/docs-unpacking .deps/docs
fi
PYTHONPATH=.deps/docs python3 -m mkdocs build --quiet --clean
doxygen - <<'EOF'
PROJECT_NAME = fusedmoe
INPUT = include
RECURSIVE = YES
FILE_PATTERNS = *.h
OUTPUT_DIRECTORY = build/site
HTML_OUTPUT = cpp
GENERATE_LATEX = NO
EXTRACT_ALL = YES
JAVADOC_AUTOBRIEF = YES
MACRO_EXPANSION = YES
PREDEFINED = FUSEDMOE_API= FUSEDMOE_C_API=
HAVE_DOT = NO
QUIET = YES
WARN_IF_UNDOCUMENTED = NO
EOF
echo "build/site/index.html"
