#!/usr/bin/env bash
# What a machine with one or more Hopper GPUs can say of layers on several ranks: builds what that
# needs, runs the tests (one GPU shared by 2 and 4 ranks; over NCCL on 2, 4 and 8 GPUs, as many as
# there are), measures dispatch and combine against NCCL alone, and prints one table. Results go to
# a folder, with the commit in their name.
#
#   scripts/ep-check.sh [--steps build,tests,bench] [--build build-cuda] [--output bench/results]
#                       [--model deepseek-v3] [--seconds 480]
#
# Exit status: 0 only when everything passed. What does not end within --seconds has failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

steps=build,tests,bench
build=build-cuda
output=bench/results
model=deepseek-v3
seconds=480
tokens=1,8,32,128,512,2048,8192

usage() {
  sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p}' "$0"
  exit 2
}
while (($#)); do
  (($# >= 2)) || usage
  case $1 in
    --steps) steps=$2 ;;
    --build) build=$2 ;;
    --output) output=$2 ;;
    --model) model=$2 ;;
    --seconds) seconds=$2 ;;
    *) usage ;;
  esac
  shift 2
done
for step in ${steps//,/ }; do
  [[ $step =~ ^(build|tests|bench)$ ]] || usage
done
wants() { [[ ,$steps, == *,$1,* ]]; }

# Not every machine has NVLink's multicast.
export NCCL_NVLS_ENABLE=0
# Where the CUDA toolkit has NCCL but no path leads there.
for folder in /usr/local/cuda/lib /usr/local/cuda/lib64; do
  [[ -e $folder/libnccl.so.2 ]] && export LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-}
done
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
commit=$(git describe --always --dirty --abbrev=7 2>/dev/null || echo unknown)
mkdir -p "$output"
result=$output/ep-$gpus-gpus-$commit.txt

failures=()
# step NAME COMMAND...: runs it within the time that is left, and remembers its name if it fails.
step() {
  local name=$1 start=$SECONDS status=0 left=$((seconds - SECONDS))
  shift
  if ((left > 0)); then
    timeout "$left" "$@" || status=$?
  else
    status=124
  fi
  ((status == 0)) || failures+=("$name")
  printf '=== %-40s %4d s  %s\n' "$name" $((SECONDS - start)) \
    "$(case $status in 0) echo ok ;; 124) echo "TIMED OUT" ;; *) echo FAILED ;; esac)"
}

build_all() {
  cmake --preset cuda -B "$build" -DFUSEDMOE_PYTHON=OFF --log-level=WARNING &&
    cmake --build "$build" --parallel --target fusedmoe_cli cuda_ranks_test
}

: >"$result"
wants build && step build build_all
"$build/cli/fusedmoe" doctor --comm | tee -a "$result"
wants tests && step tests "$build/tests/cuda_ranks_test" --gtest_brief=1
if wants bench; then
  for ranks in 2 4 8; do
    ((ranks <= gpus)) || continue
    step "bench on $ranks GPUs" "$build/cli/fusedmoe" bench --ep "$ranks" --device cuda \
      --model "$model" --tokens "$tokens" >>"$result"
  done
fi
cat "$result"
((${#failures[@]} == 0)) || { printf 'FAILED: %s\n' "${failures[@]}"; exit 1; }
