#!/usr/bin/env bash
# Tries what scripts/release.sh has built, where nothing else is: a new virtual environment, or a
# Debian of its own (debootstrap, as root) without a compiler. Each runs the demo, one gpt-oss-20b layer.
#
#   scripts/release-check.sh sdist FILE
#   scripts/release-check.sh wheel PYTHON FILE
#   scripts/release-check.sh debs FILES...
#
# RELEASE_MIRROR names another mirror of Debian.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD work=$PWD/build/release
mkdir -p "$work"
fail() { echo "$*" >&2; exit 1; }

# The demo as a user would type it; the layer is made again each time.
demo='rm -rf layer && fusedmoe synth --model gpt-oss-20b --layers 1 --tokens 64 --out layer &&
  fusedmoe run --checkpoint layer --input layer/input.safetensors --output output.safetensors --check 4'

# timed NAME LIMIT COMMAND...: in less than so many seconds.
timed() {
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  "$@" >"$work/check.log" 2>&1 || { cat "$work/check.log"; fail "$name failed"; }
  echo "$name: $((SECONDS - start)) s"
  ((SECONDS - start < limit)) || fail "$name took longer than $limit s"
}

# check_manual FOLDER ZSH: the manual page and what shells source; zsh has a folder of its own.
check_manual() {
  local file
  for file in man/man1/fusedmoe.1 bash-completion/completions/fusedmoe "zsh/$2/_fusedmoe" \
    fish/vendor_completions.d/fusedmoe.fish; do
    [[ -s $1/$file ]] || fail "$1/$file is not installed"
  done
}

check_sdist() {
  local info missing
  missing=$(comm -23 <(git ls-tree -r --name-only HEAD CMakeLists.txt cli cmake include python src | sort) \
    <(tar -tf "$1" | cut -d / -f 2- | sort))
  [[ -z $missing ]] || fail "$1 lacks what the build needs: $missing"
  info=$(tar -xOf "$1" --wildcards '*/PKG-INFO')
  grep -q '^License-Expression: Apache-2.0' <<<"$info" || fail "$1: PKG-INFO has no licence identifier"
  grep -q '^Project-URL: ' <<<"$info" || fail "$1: PKG-INFO has no project URL"
  # What is shown beside the package has no folder that a relative link could lead to.
  ! grep -nE '\]\((\.|[A-Za-z0-9_-]+[/.])[^):]*\)' <<<"$info" || fail "$1: PKG-INFO has relative links"
}

check_wheel() {
  local python=$1 wheel=$2 limit=15 environment bytes tag
  [[ $wheel != *+cu* ]] || limit=60
  bytes=$(stat -c %s "$wheel")
  ((bytes < limit << 20)) || fail "$wheel: $bytes bytes, more than $limit MiB"
  tag=$(grep -o 'manylinux_2_[0-9]*' <<<"$wheel" | head -n 1)
  grep -q "\`$tag\`" docs/install.md || fail "$wheel: docs/install.md speaks of another tag"
  environment=$(mktemp -d)
  trap 'rm -rf "$environment"' RETURN
  # Without pip's index, without other packages, and only with its own programs.
  "$python" -m venv "$environment/env"
  timed "$(basename "$wheel"): install" 60 "$environment/env/bin/pip" install --quiet --no-index "$wheel"
  check_manual "$environment/env/share" site-functions
  cd "$environment"
  timed "  demo" 60 env -i PATH="$environment/env/bin:/nowhere" HOME="$environment" \
    "$(command -v bash)" -c "${demo/rm -rf layer && /}"
  timed "  python -m fusedmoe doctor" 60 env -i PATH="$environment/env/bin" HOME="$environment" \
    python -m fusedmoe doctor
  env -i PATH="$environment/env/bin" HOME="$environment" python - <<'PYTHON'
import subprocess
import sys
import time

# CPU time: as long as nobody else wants the core, it is the time that passes.
code = "import time; a = time.process_time(); import fusedmoe; print(time.process_time() - a)"
command = [sys.executable, "-c", code]
times = [float(subprocess.check_output(command)) for _ in range(5)]
print(f"  import: {1000 * min(times):.0f} ms at best of {len(times)}")
assert min(times) < 0.1, times

import fusedmoe

assert fusedmoe.schemes() and callable(fusedmoe.quantize_checkpoint)
version = subprocess.check_output(["fusedmoe", "--version"], text=True)
assert fusedmoe.__version__ in version, version
PYTHON
  cd "$root"
}

check_debs() {
  local base=$work/bookworm place package
  [[ $(id -u) -eq 0 ]] && command -v debootstrap >/dev/null ||
    fail "to try the packages one must be root and have debootstrap"
  if [[ ! -e $base/ready ]]; then
    rm -rf "$base"
    debootstrap --variant=minbase bookworm "$base" "${RELEASE_MIRROR:-http://deb.debian.org/debian}" \
      >"$work/debootstrap.log" || { tail -n 20 "$work/debootstrap.log"; exit 1; }
    touch "$base/ready"
  fi
  place=$(mktemp -d "$work/place.XXXX")
  trap 'rm -rf "$place"' RETURN
  cp -a "$base/." "$place"
  mkdir "$place/packages"
  cp "$@" tests/package/consumer.cpp tests/package/consumer_c.c "$place/packages"
  within() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive chroot "$place" "$@"; }
  timed "lists of packages" 600 within apt-get update
  timed "the program: install" 60 within sh -c 'dpkg -i /packages/fusedmoe_*.deb'
  check_manual "$place/usr/share" vendor-completions
  ! within sh -c 'command -v gcc cc c++ python3' || fail "there is a compiler or a Python already"
  timed "  demo" 60 within sh -c "cd /root && $demo"
  timed "Python: install, with Python" 600 within sh -c \
    'apt-get install -qq --no-install-recommends /packages/python3-fusedmoe_*.deb'
  timed "  doctor" 60 within python3 -m fusedmoe doctor
  timed "library and headers: install, with a compiler" 600 within sh -c \
    'apt-get install -qq --no-install-recommends g++ pkgconf /packages/libfusedmoe*.deb'
  timed "  C++ and C programs" 120 within sh -c 'cd /packages && set -e
    g++ -std=c++20 consumer.cpp -o consumer $(pkg-config --cflags --libs fusedmoe) && ./consumer
    gcc -std=c11 consumer_c.c -o consumer_c $(pkg-config --cflags --libs fusedmoe_c) && ./consumer_c'
  for package in "$@"; do
    package=$(basename "${package%%_*}")
    [[ -s $place/usr/share/doc/$package/copyright ]] || fail "$package comes without its licence"
  done
}

case ${1:-} in
  sdist | wheel | debs) "check_$1" "${@:2}" ;;
  *) fail "usage: $0 sdist FILE | wheel PYTHON FILE | debs FILES..." ;;
esac
