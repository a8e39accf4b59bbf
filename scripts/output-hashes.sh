#!/usr/bin/env bash
# Whether outputs have the bits that they had: hashes of every implementation on every case of the
# tests, compared with those in tests/bits/.
#
#   scripts/output-hashes.sh [--device cuda] [--write] [BUILD]
#
# On the CPU once for every instruction set that the machine has. --write keeps the hashes of this
# build: for a change that is meant to change bits.
set -euo pipefail
cd "$(dirname "$0")/.."
device=cpu write=0 build=build
while (($#)); do
  case $1 in
    --device) device=$2; shift ;;
    --write) write=1 ;;
    *) build=$1 ;;
  esac
  shift
done
cmake --build "$build" --target output_hashes >/dev/null
status=0
# Four programs side by side: each spends most of its time on the host.
hashes() { # DEVICE
  local part pids=()
  {
    for part in 0 1 2 3; do
      "$build"/tests/output_hashes "$1" $part 4 &
      pids+=($!)
    done
    for part in "${pids[@]}"; do wait "$part" || exit 1; done
  } | sort
}
check() { # FILE DEVICE
  local file=tests/bits/$1
  if ((write)); then
    hashes "$2" | gzip -n9 >"$file.new"
    mv "$file.new" "$file"
    echo "$file: written"
  elif hashes "$2" | diff <(gunzip -c "$file" | sort) - >/tmp/output-hashes.diff; then
    echo "$file: equal"
  else
    echo "$file: $(grep -c '^>' /tmp/output-hashes.diff) cases differ, for example:"
    head -n 4 /tmp/output-hashes.diff
    status=1
  fi
}
if [[ $device == cpu ]]; then
  for isa in generic avx2 avx2_vnni avx512 avx512_vnni avx512_bf16 amx \
    neon neon_dotprod neon_i8mm neon_bf16; do
    export FUSEDMOE_CPU_ISA=$isa
    "$build"/tests/output_hashes --list >/dev/null 2>&1 || continue # not on this machine
    [[ -e tests/bits/cpu-$isa.txt.gz || $write -eq 1 ]] || continue
    check "cpu-$isa.txt.gz" cpu
  done
else
  check "$device.txt.gz" "$device"
fi
exit $status
