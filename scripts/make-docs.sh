#!/usr/bin/env bash
# Builds the site into build/site: the pages of docs/, the Python reference, and Doxygen's reference
# of the C++ and C headers. Needs doxygen, its theme and the package in build/python; MkDocs comes
# from pip.
set -euo pipefail
cd "$(dirname "$0")/.."
theme=${DOXYGEN_AWESOME:-/usr/share/doxygen-awesome-css}
command -v doxygen >/dev/null && [[ -d $theme ]] || {
  echo "make docs needs doxygen and its theme (Debian: doxygen, doxygen-awesome-css)" >&2
  exit 1
}
packages=(mkdocs==1.6.1 mkdocs-material==9.8.2 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11
  black==26.10.1)
if [[ "$(cat .deps/docs/packages 2>/dev/null)" != "${packages[*]}" ]]; then
  rm -rf .deps/docs .deps/docs-unpacking
  python3 -m pip install --quiet --no-warn-conflicts --root-user-action=ignore \
    --target .deps/docs-unpacking "${packages[@]}"
  echo "${packages[*]}" >.deps/docs-unpacking/packages
  mv .deps/docs-unpacking .deps/docs
fi
NO_MKDOCS_2_WARNING=1 PYTHONPATH=.deps/docs python3 -m mkdocs build --quiet --clean --strict

scripts/doxygen_filter.py --pages >build/reference.dox
doxygen -w html build/header.html build/footer.html build/doxygen.css
sed -i -e "/^<\/head>/e cat scripts/site/cpp-head.html" \
  -e 's|">$projectname<|"><a href="$relpath^../index.html">$projectname</a><|' build/header.html
version=$(sed -n 's/^#define FUSEDMOE_VERSION_[MP][A-Z]* //p' include/fusedmoe/version.h | paste -sd.)
doxygen - <<END
PROJECT_NAME = fusedmoe
PROJECT_NUMBER = $version
PROJECT_BRIEF = "C++ and C reference"
INPUT = include build/reference.dox
RECURSIVE = YES
FILE_PATTERNS = *.h
FILTER_PATTERNS = *.h=scripts/doxygen_filter.py
STRIP_FROM_PATH = include
STRIP_FROM_INC_PATH = include
OUTPUT_DIRECTORY = build/site
HTML_OUTPUT = cpp
HTML_HEADER = build/header.html
HTML_EXTRA_STYLESHEET = $theme/doxygen-awesome.css $theme/doxygen-awesome-sidebar-only.css \\
  $theme/doxygen-awesome-sidebar-only-darkmode-toggle.css scripts/site/cpp.css
HTML_EXTRA_FILES = $theme/doxygen-awesome-darkmode-toggle.js \\
  $theme/doxygen-awesome-fragment-copy-button.js
GENERATE_TREEVIEW = YES
FULL_SIDEBAR = NO
DISABLE_INDEX = NO
GENERATE_LATEX = NO
EXTRACT_ALL = YES
JAVADOC_AUTOBRIEF = YES
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = FUSEDMOE_API= FUSEDMOE_C_API=
HAVE_DOT = NO
SORT_MEMBER_DOCS = NO
SHOW_USED_FILES = NO
TYPEDEF_HIDES_STRUCT = YES
QUIET = YES
WARN_IF_UNDOCUMENTED = NO
END
echo "build/site/index.html"
