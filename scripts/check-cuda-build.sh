#!/usr/bin/env bash
# Looks through the log of a build for what makes CUDA kernels slow without making them wrong, and at
# the sizes of what was built:
#
#   scripts/check-cuda-build.sh LOG [PROGRAM...]
#
# * registers spilled to local memory: in kernels of sm90/ this already fails the build
#   (cmake/FusedmoeKernels.cmake); all others are looked for here;
# * PTX with the option -Werror, by which a driver refuses to compile what spills on its GPU;
# * wgmma instructions that ptxas serializes, or setmaxnreg that it ignores (its advices C7508 to
#   C7518; C7519 is harmless: one more warpgroup.arrive);
# * a program of more than 100 MB.
set -euo pipefail
max_bytes=100000000
status=0
log=$1
shift
if grep -nE 'Registers are spilled|[1-9][0-9]* bytes spill|\(C75[01][0-8]\)|instructions are serialized|setmaxnreg. ignored' \
  "$log"; then
  echo "$log: kernels that spill or whose wgmma instructions are serialized" >&2
  status=1
fi
for program in "$@"; do
  bytes=$(stat -c %s "$program")
  echo "$program: $((bytes / 1000000)) MB"
  if ((bytes > max_bytes)); then
    echo "$program: more than $max_bytes bytes" >&2
    status=1
  fi
  # In those of machine code -arch stands between.
  if [[ -n $(strings -a "$program" | grep -E '^-warn-spills *-Werror') ]]; then
    echo "$program: PTX with -Werror" >&2
    status=1
  fi
done
exit $status
