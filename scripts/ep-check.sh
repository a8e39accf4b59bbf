#!/usr/bin/env bash
# What a machine with one or more Hopper GPUs can say of layers on several ranks: builds what that
# needs, runs the tests (one GPU shared by 2 and 4 ranks; over NCCL and through peer memory on 2, 4
# and 8 GPUs, as many as there are), measures dispatch and combine both ways, over NCCL against NCCL
# alone, and whole steps both ways. Results go to a folder, with the commit in their name.
#
#   scripts/ep-check.sh [--steps build,tests,bench] [--build build-cuda] [--output bench/results]
#                       [--commit NAME] [--model deepseek-v3] [--seconds 2400]
#
# Exit status: 0 only when everything passed. What does not end within --seconds has failed. A time
# that is longer than wanted is marked SLOW, and passes.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

steps=build,tests,bench
build="build-cuda"
output=bench/results
commit=$(git describe --always --dirty --abbrev=7 2>/dev/null || echo unknown)
model=deepseek-v3
seconds=2400
tokens=(1 8 32 128 512 2048 8192)
build_seconds=330
test_seconds=400
bench_seconds=60  # each number of GPUs and transport
tests=(cuda_rank_rows_test cuda_ranks_test cuda_rank_deployments_test cuda_rank_hooks_test
  cuda_rank_failures_test cuda_peer_memory_test cuda_peer_set_up_test cuda_peer_sums_test
  cuda_peer_failures_test cuda_peer_processes_test cuda_peer_lanes_test cuda_peer_random_test
  cuda_peer_fetch_test cuda_peer_quantized_test cuda_peer_choice_test cuda_peer_experts_test
  cuda_moves_test cuda_moves_graphs_test cuda_moves_forwards_test)

. scripts/check-steps.sh
parse_options "steps build output commit model seconds" "build tests bench" "$@"

# Layers of cuda_peer_random_test, each of five forwards.
export FUSEDMOE_TEST_RUNS=${FUSEDMOE_TEST_RUNS:-2000}
# cuda_moves_graphs_test says how long a commit takes.
export FUSEDMOE_TEST_TIMES=1
# Not every machine has NVLink's multicast.
export NCCL_NVLS_ENABLE=0
# Where the CUDA toolkit has NCCL but no path leads there.
for folder in /usr/local/cuda/lib /usr/local/cuda/lib64; do
  [[ -e $folder/libnccl.so.2 ]] && export LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-}
done
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
mkdir -p "$output"
result=$output/ep-$gpus-gpus-$commit.txt
program=$build/cli/fusedmoe

# What the ranks should reach (docs/expert-parallel.md): against NCCL alone for the same bytes, in the same run.
add_verdicts() {
  awk '$1 !~ /^(all2all|allgather_reducescatter)$/ { print; next }
    {
      own = $1 == "all2all"
      factor = own ? 1.10 : 1.05
      dispatch = factor * $6 + (own ? ($2 == "fixed" ? 30 : 60) : 5)
      combine = factor * $11 + (own ? 20 : 5)
      print $0 "  " ($4 <= dispatch ? "ok" : "SLOW") " / " ($9 <= combine ? "ok" : "SLOW")
    }'
}
# And whole steps through peer memory (docs/performance-log.md): step_bars and exposed_bars are lists
# of TOKENS:MOST_US. With the latter, what is exposed of 8192 tokens is at most 15 % of the experts.
add_bars() {
  awk -v steps="$step_bars" -v exposed="$exposed_bars" '
    function verdict(what, bars, tokens, us,    i, count, bar, each) {
      count = split(bars, each, " ")
      for (i = 1; i <= count; ++i) {
        split(each[i], bar, ":")
        if (bar[1] == tokens) return sprintf("  %s %s", what, us <= bar[2] ? "ok" : "SLOW")
      }
      return ""
    }
    $2 != "fixed" { print; next }
    {
      text = verdict("step", steps, $3, $(NF - 5)) verdict("exposed", exposed, $3, $(NF - 1))
      if ($3 == 8192 && exposed) text = text verdict("exposed", "8192:" 0.15 * $(NF - 3), $3, $(NF - 1))
      print $0 text
    }'
}
# bench VERDICTS TRANSPORT OPTIONS...; VERDICTS: the command that adds them, or cat
bench() {
  local status=0
  within "$bench_seconds" "$program" bench --device cuda --experts "$2" "${@:3}" \
    >"$log" || status=$?
  "$1" <"$log" >>"$result"
  return $status
}

if wants build; then
  step build quietly build_programs fusedmoe_cli "${tests[@]}" || exit 1
fi
card=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
printf 'Commit %s, %s, %d x %s.\n\n' "$commit" "$(date -u +%F)" "$gpus" "$card" >"$result"
step "ways to talk" quietly within 90 "$program" doctor --comm
cat "$log" >>"$result"
if wants tests; then
  for test in "${tests[@]}"; do
    step "$test" within "$test_seconds" "$build/tests/$test" --gtest_brief=1
  done
  for test in cuda_peer_memory_test cuda_peer_lanes_test cuda_peer_random_test; do
    FUSEDMOE_TEST_BESIDE=1 step "$test, rows beside the experts" \
      within "$test_seconds" "$build/tests/$test" --gtest_brief=1
    # Random layers take five times as long there.
    FUSEDMOE_TEST_RUNS=$((FUSEDMOE_TEST_RUNS / 5)) FUSEDMOE_TEST_EXPERTS=sm80 step "$test, sm80" \
      within "$test_seconds" "$build/tests/$test" --gtest_brief=1
  done
  FUSEDMOE_TEST_EXPERTS=sm80 step "cuda_peer_quantized_test, sm80" \
    within "$test_seconds" "$build/tests/cuda_peer_quantized_test" --gtest_brief=1
fi
if wants bench; then
  for ranks in 2 4 8; do
    ((ranks <= gpus)) || continue
    rows=(--ep "$ranks" --model "$model" --rows-only --tokens "${tokens[@]}")
    # As many experts and rows a GPU as 8-way parallelism of 256 experts has.
    steps_of=(--ep "$ranks" --shape "7168x2048x$((32 * ranks))x8" --scheme fp8_block
      --tokens 8 32 128 1024 8192)
    for transport in all2all allgather_reducescatter; do
      step "$transport on $ranks GPUs" bench add_verdicts "$transport" "${rows[@]}" \
        --no-peer-memory
    done
    step "peer memory on $ranks GPUs" bench cat all2all "${rows[@]}" --peer-memory
    step "steps over NCCL on $ranks GPUs" \
      bench cat all2all "${steps_of[@]}" --no-peer-memory
    step_bars='' exposed_bars=''
    ((ranks != 2)) || exposed_bars="8:14 32:14 128:28"
    ((ranks != 4)) || step_bars="8:335 128:425 1024:1200 8192:7400" exposed_bars="8:16 32:16 128:45"
    step "steps through peer memory on $ranks GPUs" \
      bench add_bars all2all "${steps_of[@]}" --peer-memory
    exposed_bars=''
    ((ranks != 4)) || step_bars="8:570 128:1480 1024:1850 2048:2950 8192:8900"
    step "steps of 96 experts a GPU on $ranks GPUs" bench add_bars all2all --peer-memory \
      --ep "$ranks" --shape "7168x3072x$((96 * ranks))x6" --scheme fp8_block \
      --tokens 8 128 1024 2048 8192
    ((ranks != 4)) || step_bars="8:112 32:140 128:185"
    step "steps of gpt-oss-120b on $ranks GPUs" bench add_bars all2all --peer-memory \
      --ep "$ranks" --model gpt-oss-120b --scheme mxfp4_w4a16 --tokens 8 32 128
    ((ranks != 4)) || step_bars="1:28"
    step "gpt-oss-120b in slices on $ranks GPUs" bench add_bars no_ep --peer-memory \
      --tp "$ranks" --model gpt-oss-120b --scheme mxfp4_w4a16 --tokens 1 8 32 128 2048 8192
  done
fi
cat "$result"
finish
