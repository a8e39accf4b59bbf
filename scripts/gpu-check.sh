#!/usr/bin/env bash
# What a machine with a Hopper GPU can say of this tree: builds it, runs every GPU test, runs some of
# them under each tool of compute-sanitizer, then the benchmark, and prints one table of times
# against floors and peers. Results go to a folder, with the commit in their names.
#
#   scripts/gpu-check.sh [--steps build,tests,ptx,python,sanitizers,bench] [--output bench/results]
#                        [--build build-cuda] [--commit NAME] [--seconds 3600] [--cmake "ARGUMENTS"]
#                        [--ptx 8.0,8.6,8.9]
#
# Step ptx, not done unless it is named, runs the tests of the experts by PTX that the driver compiles,
# within the limits of the GPUs that it is for: sm80 as on 8.0 and 8.6, sm89 as on 8.9, or only as on
# those that --ptx names; five minutes each with one H200 and 16 cores. The code for 8.9 is only in
# builds with --cmake -DFUSEDMOE_TEST_PTX_89=ON.
#
# Step python, not done unless it is named, needs no step before it: the C interface and the Python
# package are built and tested, the latter with the first python3. That needs Python.h (if it lies
# elsewhere: --cmake -DPython_INCLUDE_DIR=FOLDER), nanobind, NumPy and pytest; PyTorch, transformers,
# CuPy and JAX are tested with where they are. What was skipped is listed with its reason. With
# PyTorch the benchmark of the package runs too.
#
# Exit status: 0 only when everything passed. What has not begun after --seconds, or does not end
# then, has failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

steps=build,tests,sanitizers,bench
output=bench/results
build="build-cuda"
commit=$(git describe --always --dirty --abbrev=7 2>/dev/null || echo unknown)
jobs=$(nproc)
seconds=3600
cmake=
ptx=8.0,8.6,8.9

# tool of compute-sanitizer | test program | cases | experts under test, by default sm90: each tool
# makes kernels 10 to 100 times slower.
# No racecheck where two warpgroups quantize groups: it reports all that they tell each other
# (exchange_amax() in epilogue_groups.cuh). None of peers either: it says that it failed to track a
# launch, and does not end. No synccheck of rows beside the experts: gather_rows() has a barrier for
# each warp, more than that tool tracks, and then the kernel fails.
checks=(
  "racecheck|cuda_experts_test|*CudaExpertsTest*gpt_oss*mxfp4_w4a16:*CudaTileConfigTest*/mxfp4_w4a16_3_*"
  "racecheck|cuda_experts_test|*CudaExpertsTest*gpt_oss*_bf16:*CudaTileConfigTest*/bf16_3_*"
  "racecheck|cuda_experts_test|*CudaExpertsTest*gpt_oss*_f16:*CudaTileConfigTest*/f16_3_*"
  "racecheck|cuda_experts_test|*CudaTileConfigTest*/mxfp4_w4a16_77_relu2*"
  "racecheck|cuda_experts_test|*CudaTileConfigTest*/bf16_77_relu2*"
  "memcheck|cuda_experts_test|*CudaExpertsTest*gpt_oss*:*CudaExpertsTest*expert_map*:*CudaExpertsTest*size_360*:*CudaTileConfigTest*_9_*:*CudaTileConfigTest*_77_*:*CudaTileConfigTest*_145_*"
  "memcheck|cuda_router_test|CudaRouterTest.*:-*ManyTokens"
  "memcheck|cuda_router_logits_test|*ANanToken*:*RoutingFollows*"
  "memcheck|cuda_router_fused_test|*gpt_oss*:*llama4*:*cluster*"
  "racecheck|cuda_router_fused_test|*gpt_oss_20b*:*llama4*:*cluster*"
  "synccheck|cuda_router_fused_test|*gpt_oss_20b*:*cluster*"
  "memcheck|cuda_backend_test|*:-*AssignManySlots"
  "memcheck|cuda_rank_rows_test|*"
  "memcheck|cuda_peer_random_test|*/?:*/1?"
  "memcheck|cuda_peer_quantized_test|*HoweverTheyTravel"
  "memcheck|cuda_peer_memory_test|*LeftInOnePlace*:*AnotherSize*"
  "memcheck|cuda_peer_sums_test|*AreThoseInRankOrder"
  "initcheck|cuda_peer_sums_test|*AreThoseInRankOrder"
  "synccheck|cuda_peer_sums_test|*AreThoseInRankOrder"
  "memcheck|cuda_peer_fetch_test|*/fp8_block_256:*/bf16_256"
  "initcheck|cuda_peer_fetch_test|*/fp8_block_256"
  "initcheck|cuda_peer_random_test|*/?"
  "synccheck|cuda_peer_random_test|*/?"
  "memcheck|cuda_layer_test|CudaLayerTest.*"
  "memcheck|cuda_runtime_test|*"
  "memcheck|cuda_routing_data_test|*one_*:*map*:*warp*"
  "memcheck|cuda_combine_test|*"
  "memcheck|cuda_pack_test|*64x64*:*360x90*"
  "memcheck|cuda_experts_shapes_test|*Batched*:*Duplicate*"
  "memcheck|cuda_hooks_test|*"
  "memcheck|cuda_golden_test|*mixtral*:*gpt_oss*"
  "memcheck|cuda_schemes_test|*MatchReference*fp8_block_bf16:*MatchReference*w4a8*:*MatchReference*nvfp4_bf16:*CudaQuantizers*"
  "memcheck|cuda_schemes_test|*MatchReference*int4_g32_zp_f16:*MatchReference*int8_g128_bf16:*MatchReference*mxfp8_bf16:*UnpackIsTheInverse*"
  "racecheck|cuda_schemes_parts_test|*CudaCodedTiles*fp8_channel_token_relu2*:*CudaCodedTiles*fp8_block_gelu*"
  "racecheck|cuda_schemes_parts_test|*CudaCodedTiles*fp8_block_silu_unfused"
  "racecheck|cuda_schemes_test|*EveryConfiguration*w4a8_bf16"
  "racecheck|cuda_schemes_test|*EveryConfiguration*nvfp4_bf16"
  "initcheck|cuda_schemes_test|*MatchReference*fp8_channel_token_bf16:*MatchReference*int4_g128_bf16"
  "synccheck|cuda_schemes_test|*MatchReference*fp8_block_bf16:*MatchReference*w4a8*"
  "memcheck|cuda_one_token_test|*"
  "racecheck|cuda_one_token_test|*ShapesThatDivideNothing*:*NoSlotAtAll*"
  "initcheck|cuda_one_token_test|*AnyNumberOfSlots*"
  "synccheck|cuda_one_token_test|*ShapesThatDivideNothing*"
  "racecheck|cuda_experts_test|*CudaExpertsTest*gpt_oss*_bf16:*CudaExpertsTest*gpt_oss*mxfp4_w4a16|sm80"
  "memcheck|cuda_experts_test|*CudaExpertsTest*gpt_oss*:*CudaTileConfigTest*_9_*|sm80"
  "initcheck|cuda_experts_test|*CudaExpertsTest*gpt_oss*|sm80"
  "synccheck|cuda_experts_test|*CudaExpertsTest*gpt_oss*:*CudaTileConfigTest*_145_*|sm80"
  "racecheck|cuda_schemes_test|CudaInt8.SumsAreExact|sm80"
  "racecheck|cuda_schemes_test|*MatchReference*fp8_block_bf16|sm80"
  "memcheck|cuda_schemes_test|*MatchReference*fp8_block_bf16:*MatchReference*int8_w8a8_bf16|sm80"
  "memcheck|cuda_schemes_test|*MatchReference*fp8_channel_token_bf16:*MatchReference*w4a8_bf16|sm80"
  "racecheck|cuda_routing_data_test|*one_slot:*one_token:*a_warp*:*fewer_slots*:*one_past_a_block*"
  "racecheck|cuda_router_test|CudaRouterTest.OneExpert*:CudaRouterTest.TheHistogram*"
  "racecheck|cuda_backend_test|*Duplicates*:*RoutingOfShared*"
  "initcheck|cuda_experts_test|*CudaExpertsTest*gpt_oss*:*CudaExpertsTest*negative_ids*"
  "initcheck|cuda_router_test|CudaRouterTest.OneExpert*:CudaRouterTest.TheHistogram*"
  "initcheck|cuda_layer_test|CudaLayerTest.InPlace:CudaLayerTest.RoutedIds*"
  "synccheck|cuda_experts_test|*CudaExpertsTest*gpt_oss*:*CudaTileConfigTest*_145_*"
  "synccheck|cuda_router_test|CudaRouterTest.*:-*ManyTokens"
  "synccheck|cuda_backend_test|*Duplicates*:*RoutingOfShared*"
)
build_seconds=300
test_seconds=600
ptx_seconds=900
model_seconds=200
check_seconds=400  # each
side_by_side=6     # checks
bench_seconds=120  # each model

tokens=1,8,32,128,512,2048,8192
# name of the result | scheme | routing | models
benches=(
  "mxfp4|mxfp4_w4a16|balanced|gpt-oss-20b gpt-oss-120b"
  "bf16|bf16|balanced|gpt-oss-20b gpt-oss-120b mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b deepseek-v3 llama4-scout"
  "fp8|fp8_block|balanced|gpt-oss-20b mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b deepseek-v3 llama4-scout"
  "fp8-token|fp8_channel_token|balanced|mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b llama4-scout"
  "int4|int4_g128|balanced|mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b deepseek-v3 llama4-scout"
  "nvfp4|nvfp4_w4a16|balanced|mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b deepseek-v3 llama4-scout"
  "w4a8|w4a8|balanced|mixtral-8x7b qwen3-30b-a3b qwen3-235b-a22b deepseek-v3 llama4-scout"
  "mxfp4-fp8|mxfp4_fp8|balanced|gpt-oss-20b gpt-oss-120b"
  "mxfp4-mxfp4|mxfp4|balanced|gpt-oss-20b gpt-oss-120b"
  "nvfp4-nvfp4|nvfp4|balanced|qwen3-30b-a3b deepseek-v3"
  "mxfp4-zipf|mxfp4_w4a16|zipf|gpt-oss-20b gpt-oss-120b"
  "bf16-zipf|bf16|zipf|gpt-oss-20b qwen3-30b-a3b"
)

. scripts/check-steps.sh
parse_options "steps output build commit seconds cmake ptx" "build tests ptx python sanitizers bench" "$@"
mkdir -p "$output"
result=$output/h200-$commit

programs=(tests/cuda/*_test.cpp)
programs=("${programs[@]##*/}")
programs=("${programs[@]/%.cpp/}")
programs=("${programs[@]/#/cuda_}")
build_python() {
  configure -DFUSEDMOE_PYTHON=ON -DPython_EXECUTABLE="$(command -v python3)" &&
    build_targets fusedmoe_cli capi_tests fusedmoe_python
}
if wants build; then
  step build quietly build_programs fusedmoe_cli "${programs[@]}" || exit 1
  step "registers and sizes" scripts/check-cuda-build.sh "$log" "$build/cli/fusedmoe"
fi

if wants python; then
  step "build of the C interface and the Python package" quietly build_python || exit 1
fi

program=$build/cli/fusedmoe
step "a usable GPU" quietly "$program" explain --model gpt-oss-20b --device cuda || exit 1
device=$("$program" doctor | sed -n 's/^.*cuda:0 //p')

# Programs that read FUSEDMOE_TEST_EXPERTS, as tests/CMakeLists.txt has them.
of_experts=(experts experts_shapes experts_runs experts_large golden hooks schemes schemes_parts
  one_token pack tune context)
# run_tests LINE...: a program and the experts under test, with the GPU whose limits they shall have.
# Programs side by side, few threads each, on all GPUs in turns: ctest would start a context for every
# case. The longest run in parts.
run_tests() {
  local gpus=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)}
  printf '%s\n' "$@" | awk -v gpus="$gpus" 'BEGIN { count = split(gpus, gpu, ",") } {
      parts = $1 == "schemes" || $1 == "experts_shapes" && $2 != "sm90" ? 6 : 1
      for (i = 0; i < parts; ++i) print $1, $2, parts, i, gpu[n++ % count + 1]
    }' | OMP_NUM_THREADS=3 CUDA_CACHE_MAXSIZE=4294967296 xargs -P $((jobs / 3 + 1)) -L 1 sh -c '
      export GTEST_TOTAL_SHARDS=$2 GTEST_SHARD_INDEX=$3 CUDA_VISIBLE_DEVICES=$4
      [ $1 = sm90 ] || export FUSEDMOE_TEST_EXPERTS=${1%-*}
      case $1 in *-*) export CUDA_FORCE_PTX_JIT=1 FUSEDMOE_PRETEND_CAPABILITY=${1#*-} ;; esac
      program=$build/tests/cuda_$0_test log=$build/tests/cuda_$0_test.$1.$3.log
      "$program" --gtest_brief=1 >"$log" 2>&1 || { cat "$log"; echo "$0 $1 failed"; exit 1; }'
}
# test_ways NAME LINE...
test_ways() {
  rm -f "$build"/tests/cuda_*_test.*.log
  step "$1" quietly within "$test_seconds" bash -c "$(declare -f run_tests); export build=$build
    jobs=$jobs; run_tests \"\$@\"" "$@"
  grep -hE '^\[  (PASSED|SKIPPED)' "$build"/tests/cuda_*_test.*.log |
    awk '{ count[$2] += $4 } END { for (what in count) print count[what], "tests", what }'
  grep -h ptxVersion "$build"/tests/cuda_*_test.*.log | sort | uniq -c
  grep -L PASSED "$build"/tests/cuda_*_test.*.log | sed 's/$/: did not end/'
}
if wants tests; then
  # Those of ranks measure a whole GPU's memory, and times: ep-check.sh runs them one by one.
  all=()
  for each in "${programs[@]#cuda_}"; do
    [[ $each =~ ^(peer|rank|ranks|moves)_ ]] || all+=("$each")
  done
  test_ways "GPU tests" "${all[@]/%_test/ sm90}" "${of_experts[@]/%/ sm80}"
fi
if wants ptx; then
  ways=()
  [[ $ptx != *8.0* ]] || ways+=("${of_experts[@]/%/ sm80-8.0}")
  [[ $ptx != *8.6* ]] || ways+=("${of_experts[@]/%/ sm80-8.6}" "router_fused sm80-8.6")
  if [[ $ptx == *8.9* ]] && grep -q '^FUSEDMOE_TEST_PTX_89:BOOL=ON' "$build/CMakeCache.txt"; then
    ways+=("${of_experts[@]/%/ sm89-8.9}")
  fi
  test_seconds=$ptx_seconds test_ways "GPU tests as PTX" "${ways[@]}"
fi

test_c() {
  within "$test_seconds" "$build/tests/capi_tests" --gtest_filter='CCuda*' | tee "$log"
  ((PIPESTATUS[0] == 0)) && grep -qE '[1-9][0-9]* tests' "$log" && ! grep -q 'SKIPPED' "$log"
}
test_python() {
  FUSEDMOE_GOLDEN_DIR=$build/tests/golden/public FUSEDMOE_EXPECT_CUDA=1 within "$test_seconds" \
    python3 -m pytest -q -s -rs --durations=5 -p no:cacheprovider tests/python/test_cuda_arrays.py \
    tests/python/test_cuda.py
}
test_models() {
  FUSEDMOE_PROGRAM=$build/cli/fusedmoe FUSEDMOE_EXPECT_CUDA=1 within "$model_seconds" \
    python3 -m pytest -q -rs --durations=5 -p no:cacheprovider -k "cuda or gpu" \
    tests/python/test_transformers.py tests/python/test_vllm.py
}
bench_python() {
  within "$bench_seconds" python3 -m fusedmoe.bench --device cuda:0 --shape olmoe --min-time 0.1 \
    --tokens 1 64 1024 --json "$result-python${1:+-$1}.json" ${1:+--scheme "$1"}
}
if wants python; then
  # Where install-deps.sh puts what this python3 does not have.
  python3 -c 'import numpy, pytest' 2>/dev/null || PYTHONPATH+=:$PWD/.deps/python
  export PYTHONPATH=$build/python:${PYTHONPATH:-}
  step "C interface" test_c
  step "Python package" test_python
  if python3 -c 'import torch, transformers' 2>/dev/null; then
    step "models of transformers, and vLLM" test_models
  else
    echo "no PyTorch or no transformers: whole models and vLLM were not run"
  fi
  if python3 -c 'import torch' 2>/dev/null; then
    step "Python benchmark, bf16" bench_python
    step "Python benchmark, FP8" bench_python fp8_channel_token
  else
    echo "no PyTorch: its tests and the Python benchmark were not run"
  fi
fi

# One tool on some cases of one program, by its place in the list; its output and its exit status to
# files.
sanitize() {
  local log=$log.$1 tool=$2 test=$3 filter=$4 options=(--error-exitcode 9) status=0 start=$SECONDS
  # A plan names links that are slow, and a tool makes them slow.
  [[ $test == cuda_peer* ]] && options+=(--kernel-name-exclude kns=read_arena_kernel)
  [[ -z $5 ]] || local -x FUSEDMOE_TEST_EXPERTS=$5
  # Failing calls are what some tests are about.
  [[ $tool == memcheck ]] && options+=(--report-api-errors no)
  OMP_NUM_THREADS=2 within "$check_seconds" "$sanitizer" --tool "$tool" "${options[@]}" \
    "$build/tests/$test" --gtest_brief=1 --gtest_filter="$filter" >"$log" 2>&1 || status=$?
  grep -qE 'Running 0 tests|^\[==========\] 0 tests' "$log" && status=3  # no case
  echo "$status $((SECONDS - start))" >"$log.status"
}
sanitized() {
  local log=$log.$1 status=1 elapsed=0
  read -r status elapsed <"$log.status"
  echo "$2 $3 $4 $5: $elapsed s"
  if ((status != 0)); then
    grep -m 30 '^=========' "$log"  # the first report
    tail -n 20 "$log"
  fi
  return "$status"
}
if wants sanitizers; then
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  for i in "${!checks[@]}"; do
    IFS='|' read -r tool test filter experts <<<"${checks[i]}"
    while (($(jobs -rp | wc -l) >= side_by_side)); do wait -n; done
    sanitize "$i" "$tool" "$test" "$filter" "$experts" &
  done
  wait
  for i in "${!checks[@]}"; do
    IFS='|' read -r tool test filter experts <<<"${checks[i]}"
    step "$tool $test" sanitized "$i" "$tool" "$test" "$filter" "$experts"
  done
fi

# One model at several numbers of tokens, added to a CSV.
bench_model() {
  local scheme=$1 routing=$2 model=$3 csv=$4 status=0
  within "$bench_seconds" "$program" bench --device cuda --model "$model" --scheme "$scheme" \
    --skew "$routing" --tokens "$tokens" --csv >"$log" || status=$?
  if [[ -s $csv ]]; then sed 1d "$log" >>"$csv"; else cat "$log" >"$csv"; fi
  return $status
}
write_table() {
  printf 'Commit %s, %s, %s.\n\n' "$commit" "$(date -u +%F)" "$device" >"$result.md"
  python3 bench/peer_table.py --peers bench/peers-h200.csv "$@" >>"$result.md"
}
if wants bench; then
  csvs=()
  for entry in "${benches[@]}"; do
    IFS='|' read -r name scheme routing models <<<"$entry"
    csv=$result-$name.csv
    csvs+=("$csv")
    : >"$csv"
    for model in $models; do
      step "bench $name $model" bench_model "$scheme" "$routing" "$model" "$csv"
    done
  done
  step table write_table "${csvs[@]}"
  cat "$result.md"
fi

finish
