#!/usr/bin/env bash
# test.sh PROGRAM CONFIG_DIR WORK_DIR CASE EXAMPLES: one situation of the real program (or of one of
# the examples in that directory) on a tiny checkpoint.
set -euo pipefail
program=$1 configs=$2 work=$3/$4 situation=$4 examples=$5
rm -rf "$work"
mkdir -p "$work"
cd "$work"

fail() {
  echo "FAILED: $1" >&2
  for file in out err; do [[ -e $file ]] && sed "s/^/  $file: /" "$file" >&2; done
  exit 1
}

# succeeds ARGS...: exit status 0; stdout in out, stderr in err.
succeeds() {
  "$program" "$@" >out 2>err || fail "exit status $? of: $*"
}

# refuses PATTERN ARGS...: non-zero exit status, nothing on stdout, and an error that matches.
refuses() {
  local pattern=$1
  shift
  if "$program" "$@" >out 2>err; then fail "exit status 0 of: $*"; fi
  [[ ! -s out ]] || fail "data on stdout of: $*"
  grep -Eq -- "$pattern" err || fail "no '$pattern' on stderr of: $*"
}

says() {
  grep -Eq -- "$1" out || fail "no '$1' on stdout"
}

# What follows the header of a safetensors file, whose length is in its first eight bytes.
tensor_data() {
  tail -c +$((9 + $(od -An -t u8 -N 8 "$1"))) "$1"
}

synth() {
  succeeds synth --config "$configs/$1.json" --tokens 9 --out model "${@:2}"
}

# A config whose experts' rows are whole groups of 32.
whole_groups() {
  sed 's/"moe_intermediate_size": 40/"moe_intermediate_size": 64/' "$configs/qwen3_tiny.json" >whole.json
}

run_args=(run --checkpoint model --input model/input.safetensors --output out.safetensors)

case $situation in
  run)
    synth gpt_oss_tiny --layers 2
    succeeds "${run_args[@]}" --check 9 --load-chart --threads 2
    says '^cpu\+no_ep mxfp4_w4a16 bf16 .*tokens=9 .*ms$'
    says '^18 rows on [1-5] of 5 experts'
    says '^9 of 9 rows against reference .*: passed$'
    [[ $(wc -l <out) -eq 8 ]] || fail "expected plan, 5 bars, totals and check"
    for name in output topk_ids topk_weights router_logits; do
      head -c 2000 out.safetensors | grep -aq "\"$name\"" || fail "no $name in the output"
    done
    ;;
  run_is_repeatable)
    synth qwen3_tiny
    succeeds "${run_args[@]}"
    succeeds "${run_args[@]}" --output again.safetensors --threads 1
    cmp <(tensor_data out.safetensors) <(tensor_data again.safetensors) || fail "other bits"
    ;;
  run_every_dtype_and_experts)
    synth gpt_oss_tiny
    for experts in cpu+no_ep reference+no_ep cpu+batched reference+batched; do
      for dtype in f32 bf16 f16; do
        succeeds "${run_args[@]}" --experts "$experts" --dtype "$dtype" --check 3 \
          --threads 1
        says "^${experts/+/\\+} .* $dtype "
      done
    done
    for wish in --hooks --monolithic --batch-invariant; do
      succeeds "${run_args[@]}" "$wish" --check 3 --threads 1
      says '^cpu\+no_ep '
    done
    ;;
  run_chosen_layer)
    synth gpt_oss_tiny --layers 2
    succeeds "${run_args[@]}" --layer 1 --check 9
    refuses 'layer.*7' "${run_args[@]}" --layer 7
    ;;
  run_without_tokens)
    succeeds synth --config "$configs/gpt_oss_tiny.json" --tokens 0 --out model
    succeeds "${run_args[@]}" --check 3 --load-chart
    says '^0 rows on 0 of 5 experts'
    ;;
  run_on_ranks)
    synth gpt_oss_tiny
    succeeds "${run_args[@]}" --batch-invariant
    for ranks in '--ep 3' '--tp 2 --dp 2 --ep 4'; do
      # shellcheck disable=SC2086  # two words
      succeeds "${run_args[@]}" --output ranks.safetensors --batch-invariant --check 9 $ranks
      says '^cpu\+all2all '
      cmp <(tensor_data out.safetensors) <(tensor_data ranks.safetensors) || fail "other bits"
    done
    for ranks in '--tp 2' '--dp 2' '--tp 2 --ep 2'; do
      # shellcheck disable=SC2086
      succeeds "${run_args[@]}" --output ranks.safetensors --check 9 $ranks
    done
    refuses '^error: --ep: was 3; must be 2' "${run_args[@]}" --ep 3 --tp 2
    refuses 'at least one unit for each of 7 ranks' "${run_args[@]}" --tp 7
    succeeds bench --ep 2 --model gpt-oss-20b --tokens 4 --max-seconds 0.1 --min-samples 2
    says '^all2all +exact +4 '
    says '^allgather_reducescatter +fixed +4 '
    says ' step +experts +exposed$'
    succeeds bench --ep 2 --model gpt-oss-20b --rows-only --tokens 4 --max-seconds 0.1 \
      --min-samples 2
    says 'memcpy +ratio$'
    ;;
  run_joins_launched_ranks)
    synth gpt_oss_tiny
    succeeds "${run_args[@]}" --batch-invariant
    cp out.safetensors one.safetensors
    port=$((20000 + $$ % 12000))  # below those that the system gives to connections
    # launched SIZE RANK_VARIABLE SIZE_VARIABLE ARGS...: so many processes, as a launcher starts them.
    launched() {
      local size=$1 rank
      for ((rank = 0; rank < size; ++rank)); do
        env "$2=$rank" "$3=$size" MASTER_ADDR=127.0.0.1 MASTER_PORT="$port" "$program" "${@:4}" \
          >"out$rank" 2>"err$rank" &
      done
      status=0
      for ((rank = 0; rank < size; ++rank)); do wait -n || status=$?; done
      cat out? >out
      cat err? >err
      rm out? err?
      port=$((port + 1))
    }
    launched 3 RANK WORLD_SIZE "${run_args[@]}" --output ranks.safetensors --batch-invariant \
      --check 9 --ep 3
    [[ $status -eq 0 && $(wc -l <out) -eq 2 ]] || fail "three ranks, of which one prints"
    grep -q '^rank 0: info: wrote' err || fail "no rank in front"
    cmp <(tensor_data one.safetensors) <(tensor_data ranks.safetensors) || fail "other bits"
    launched 2 OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE "${run_args[@]}" --tp 2 --check 9
    [[ $status -eq 0 && $(wc -l <out) -eq 2 ]] || fail "two ranks of Open MPI"
    launched 2 RANK WORLD_SIZE bench --ep 2 --model gpt-oss-20b --tokens 4 --max-seconds 0.1 \
      --min-samples 2 --json
    [[ $status -eq 0 && $(wc -l <out) -eq 1 ]] || fail "one line of JSON"
    says '"backend":"tcp".*"memcpy_us":'
    launched 2 RANK WORLD_SIZE "${run_args[@]}" --ep 3
    grep -q '^rank 1: error: .* was 3 ranks; must be 2, the processes' err || fail "3 of 2 ranks"
    # A program for GPUs has MPI only if that was asked for; the one without CUDA always has it.
    [[ ! -x ${program}_cpu ]] || program+=_cpu
    if "$program" doctor --comm | grep -q '^mpi  *Open MPI'; then
      export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
      rm ranks.safetensors
      mpirun --oversubscribe -n 4 "$program" "${run_args[@]}" --output ranks.safetensors \
        --batch-invariant --ep 4 --tp 2 >out 2>err || fail "mpirun"
      [[ $(wc -l <out) -eq 1 ]] || fail "one rank prints"
      cmp <(tensor_data one.safetensors) <(tensor_data ranks.safetensors) || fail "other bits"
    fi
    ;;
  run_bounded_workspace)
    succeeds synth --config "$configs/qwen3_tiny.json" --tokens 3000 --out model
    succeeds "${run_args[@]}"
    succeeds "${run_args[@]}" --output again.safetensors --max-workspace 1 --check 3
    cmp <(tensor_data out.safetensors) <(tensor_data again.safetensors) || fail "other bits"
    refuses '--max-workspace' "${run_args[@]}" --max-workspace 0
    ;;
  run_json)
    synth gpt_oss_tiny
    succeeds "${run_args[@]}" --json --check 2 --repeat 3
    [[ $(wc -l <out) -eq 1 ]] || fail "more than one line"
    says '"passed":true.*"load":\{.*"rows_per_expert":\[.*"ms":'
    ;;
  run_leaves_no_output_on_failure)
    synth gpt_oss_tiny
    refuses 'nowhere' "${run_args[@]}" --checkpoint nowhere
    refuses 'nowhere' "${run_args[@]}" --input nowhere
    refuses 'hidden_state_typo' "${run_args[@]}" --input-name hidden_state_typo
    refuses 'cuda' "${run_args[@]}" --device cuda:99
    refuses 'device.*tpu' "${run_args[@]}" --device tpu
    refuses 'dtype.*fp8' "${run_args[@]}" --dtype fp8
    refuses '^error: --experts fastest: no such implementation; there are: cpu, reference, sm90$' \
      "${run_args[@]}" --experts fastest
    for threads in -1 0 1025 99999999999; do
      refuses '--threads' "${run_args[@]}" --threads "$threads"
    done
    refuses '--input is required' run --checkpoint model --output out.safetensors
    refuses 'no/such/folder' "${run_args[@]}" --output no/such/folder/out.safetensors
    succeeds synth --config "$configs/qwen3_tiny.json" --tokens 2 --out other
    refuses '\[2, 64\].*96' "${run_args[@]}" --input other/input.safetensors
    [[ ! -e out.safetensors ]] || fail "an output file was left"
    ! compgen -G 'out.safetensors*' >/dev/null || fail "a temporary file was left"
    ;;
  run_spares_its_inputs)
    synth gpt_oss_tiny
    ln model/input.safetensors linked.safetensors
    find model -type f -exec sha256sum {} + >sums
    for file in model/input.safetensors model/model.safetensors model/config.json \
      linked.safetensors model/../model/model.safetensors; do
      refuses '--output: was .*(checkpoint|--input)' "${run_args[@]}" --output "$file"
    done
    mkfifo pipe
    refuses '--output: was pipe, not a regular file' "${run_args[@]}" --output pipe
    refuses '--output: was model, not a regular file' "${run_args[@]}" --output model
    refuses '--output: was /dev/null, not' "${run_args[@]}" --output /dev/null
    [[ -p pipe && -c /dev/null ]] || fail "a special file was replaced"
    sha256sum --check --quiet sums || fail "a file that was read has changed"
    succeeds "${run_args[@]}" --output model/out.safetensors
    succeeds "${run_args[@]}" --output model/out.safetensors
    ;;
  run_truncated_checkpoint)
    synth gpt_oss_tiny
    size=$(stat -c %s model/model.safetensors)
    truncate -s $((size - 1)) model/model.safetensors
    refuses 'model.safetensors' "${run_args[@]}"
    truncate -s 4 model/model.safetensors
    refuses 'model.safetensors' "${run_args[@]}"
    [[ ! -e out.safetensors ]] || fail "an output file was left"
    ;;
  run_replays_routing)
    synth qwen3_tiny
    succeeds "${run_args[@]}" --record-routing routing.safetensors --load --heat-map
    says '^ +tokens +rows +experts +distinct +expected +most +mean +balance$'
    says '^ +9 +27 +100 +[0-9]+ '
    says '^experts +64 - +99 \|.{36}\|$'
    says '^a token shares [0-3]\.[0-9]{2} of its 3 experts with the token before$'
    succeeds "${run_args[@]}" --replay-routing routing.safetensors --check 9 \
      --output again.safetensors
    says '^9 of 9 rows .*: passed$'
    # The replayed run has no router logits, which would come first: the rest is the same.
    size=$(stat -c %s out.safetensors)
    [[ $size -gt $(stat -c %s again.safetensors) ]] || fail "router logits of a replayed run"
    succeeds "${run_args[@]}" --replay-routing out.safetensors --output third.safetensors
    cmp <(tensor_data again.safetensors) <(tensor_data third.safetensors) || fail "other bits"
    synth_other=(synth --config "$configs/gpt_oss_tiny.json" --tokens 9 --out other)
    succeeds "${synth_other[@]}"
    refuses 'routing.safetensors' run --checkpoint other --input other/input.safetensors \
      --output fourth.safetensors --replay-routing routing.safetensors
    refuses '--record-routing.*--output' "${run_args[@]}" --record-routing ./out.safetensors
    refuses '--output.*--replay-routing' "${run_args[@]}" --replay-routing routing.safetensors \
      --output routing.safetensors
    succeeds synth --config "$configs/qwen3_tiny.json" --tokens 4 --out fewer
    refuses '--replay-routing: was 9 rows' "${run_args[@]}" --input fewer/input.safetensors \
      --replay-routing routing.safetensors
    ;;
  run_pinned_plan)
    synth gpt_oss_tiny
    succeeds explain --checkpoint model --experts cpu+batched --save-plan plan.json
    succeeds "${run_args[@]}" --plan plan.json
    says '^cpu\+batched mxfp4_w4a16 bf16'
    refuses 'plan.dtype: was "bf16"' "${run_args[@]}" --plan plan.json --dtype f32
    refuses 'excludes' "${run_args[@]}" --plan plan.json --experts cpu
    sed 's/"isa": "[a-z0-9_]*"/"isa": "sse2"/' plan.json >other.json
    refuses 'plan.isa: was "sse2"' "${run_args[@]}" --plan other.json
    echo '{' >broken.json
    refuses 'plan: was not JSON' "${run_args[@]}" --plan broken.json
    refuses 'nowhere' "${run_args[@]}" --plan nowhere.json
    refuses 'no/such' explain --checkpoint model --save-plan no/such/plan.json
    ;;
  run_quantized_checkpoint)
    whole_groups
    succeeds synth --config whole.json --tokens 9 --out float
    for scheme in fp8_channel_token int4_g32 nvfp4; do
      rm -rf model
      succeeds quantize --checkpoint float --scheme "$scheme" --output model \
        --calibrate float/input.safetensors
      for experts in cpu+no_ep cpu+batched reference+no_ep; do
        succeeds "${run_args[@]}" --input float/input.safetensors --experts "$experts" --check 9
        says "^${experts/+/\\+} $scheme bf16"
      done
    done
    ;;
  compare)
    succeeds synth --config "$configs/qwen3_tiny.json" --tokens 9 --out model
    succeeds compare --checkpoint model --input model/input.safetensors --max-experts 0 \
      --schemes f32,bf16,fp8_channel_token,int4_g32,nvfp4 --json
    says '"num_experts": 100'
    [[ $(grep -c '"relative_error"' out) -eq 5 ]] || fail "expected five schemes"
    succeeds compare --checkpoint model --tokens 3 --repeat 1 --schemes bf16,mxfp8 --dtype f32
    says '^mxfp8 +[0-9.]+ kB +8\.[0-9]+ '
    refuses 'fp9' compare --checkpoint model --schemes bf16,fp9
    refuses 'nowhere' compare --checkpoint nowhere --schemes bf16
    refuses 'typo' compare --checkpoint model --schemes bf16 \
      --input model/input.safetensors --input-name typo
    ;;
  quantize)
    whole_groups
    succeeds synth --config "$configs/qwen3_tiny.json" --tokens 9 --out tiny
    refuses '40 is no multiple of 32' quantize --checkpoint tiny --scheme int4_g32 --output other
    succeeds synth --config whole.json --tokens 9 --out plain
    succeeds quantize --checkpoint plain --scheme nvfp4 --output model
    says '^model: nvfp4 in the layout of modelopt, .* in .* s$'
    succeeds "${run_args[@]}" --check 9
    says '^9 of 9 rows against reference .*: passed$'
    succeeds quantize --checkpoint plain --scheme int4_g32_zp --layout awq --output awq --json
    says '"layout":"awq".*"scheme":"int4_g32_zp"'
    succeeds quantize --checkpoint plain --scheme mxfp4 --layout compressed-tensors --output mx
    succeeds run --checkpoint mx --input plain/input.safetensors --output y.safetensors
    says 'mxfp4:even '
    succeeds run --checkpoint mx --input plain/input.safetensors --output y.safetensors \
      --scheme mxfp4:ocp
    says 'mxfp4 '
    refuses '^error: --scheme: was mxfp8; must be a scheme that differs from mxfp4:even' run \
      --checkpoint mx --input plain/input.safetensors --output y.safetensors --scheme mxfp8
    refuses '^error: --layout: was awq' quantize --checkpoint plain --scheme fp8_block --layout awq \
      --output other
    refuses '^error: --scheme int3: no such name; there are: .*nvfp4' quantize --checkpoint plain --scheme int3 --output other
    refuses 'exists and is no empty directory' quantize --checkpoint plain --scheme nvfp4 --output awq
    [[ ! -e other ]] || fail "a directory left behind"
    ;;
  synth_refuses)
    refuses 'gpt-9.*gpt-oss-20b' synth --model gpt-9 --out model
    refuses 'nowhere.json' synth --config nowhere.json --out model
    echo '{"model_type": "gpt_oss"' >broken.json
    refuses 'config' synth --config broken.json --out model
    echo '{"model_type": "llama"}' >dense.json
    refuses 'model_type.*llama' synth --config dense.json --out model
    refuses 'exactly|[Rr]equire' synth --model gpt-oss-20b --config broken.json --out model
    [[ ! -e model ]] || fail "a directory was left"
    ;;
  inspect)
    synth qwen3_tiny
    succeeds inspect model
    says '^family +qwen3_moe$'
    says '^router +softmax, top-3 of 100, renormalized$'
    says 'experts\.\{0\.\.99\}\.gate_proj\.weight +bf16 +\[40, 64\]'
    succeeds inspect model --json
    says '"num_experts":100'
    refuses '^error: cannot open nowhere: no such file or directory$' inspect nowhere
    refuses '--layer.*9' inspect model --layer 9
    # What run would refuse: a width that the tensors do not have.
    sed 's/"moe_intermediate_size": *[0-9]*/"moe_intermediate_size": 48/' model/config.json >config.json
    mv config.json model/config.json
    refuses 'gate_proj.weight: shape \[40, 64\], must be \[48, 64\]' inspect model
    refuses 'gate_proj.weight: shape \[40, 64\], must be \[48, 64\]' explain --checkpoint model
    echo '{"model_type": null}' >model/config.json
    refuses 'config.model_type: was null' inspect model
    ;;
  families)
    succeeds families
    says '^qwen3_moe$'
    says '^not served:$'
    succeeds families --json
    says '"name":"qwen3_moe"'
    succeeds families qwen2_moe
    says '"shared_expert_gate.weight"'
    refuses 'nobody' families nobody
    echo '{"families": [{"name": "first", "like": "mixtral"},
      {"name": "mine", "like": "qwen3_moe", "router": {"groups": 4, "kept_groups": 1}}]}' >mine.json
    succeeds families --check mine.json
    says '^mine.json: first$'
    says '^mine.json: mine$'
    echo '{"families": []}' >empty.json
    refuses '^error: empty.json: families: was an empty list' families --check empty.json
    echo '{"name": "much", "like": "mixtral", "experts": {"count": 1000000000000000}}' >much.json
    refuses 'much.experts.count: was 1000000000000000' families --check much.json
    synth qwen3_tiny
    succeeds "${run_args[@]}" --check 9
    succeeds "${run_args[@]}" --family mine.json --check 9 --output mine.safetensors
    says '^9 of 9 rows .*: passed$'
    ! cmp -s out.safetensors mine.safetensors || fail "the same output with groups of experts"
    refuses 'much.experts.count' "${run_args[@]}" --family much.json
    refuses 'nobody' "${run_args[@]}" --family nobody
    ;;
  explain)
    synth gpt_oss_tiny
    succeeds explain --checkpoint model
    says '^\* +cpu +no_ep '
    says '^ +reference +no_ep '
    says '^workspace for 64 tokens: '
    succeeds explain --model deepseek-v3 --json --tokens 5
    says '"num_tokens":5'
    refuses '^error: cuda:99: ' explain --model gpt-oss-20b --device cuda:99
    [[ $(wc -l <err) -eq 1 ]] || fail "more than one sentence"
    refuses '^error: --experts fast: no such' explain --model gpt-oss-20b --experts fast
    # In a build without CUDA the answer is no, but there is one.
    "$program" explain --model gpt-oss-20b --compute-capability 9.0 >out 2>err || true
    says 'on cuda:0 of compute capability 9\.0$'
    says '^[* ] +sm90 +no_ep +standard +'
    [[ $(grep -c '_ep\|batched' out) -le 12 ]] || fail "more than a dozen rows"
    succeeds explain --model gpt-oss-120b --ep 64 --combine per_slot
    says '^64 ranks: tp 1, dp 64, ep 64; rank 0 has 2 experts of 2880 x 2880; per_slot'
    says '^\* +cpu +all2all '
    succeeds explain --model gpt-oss-120b --tp 4
    says '^\* +cpu +no_ep '
    succeeds explain --matrix
    says '^\| w4a8 +\| i4, .* \| yes +\| yes +\| '
    for wish in --hooks --monolithic; do
      succeeds explain --checkpoint model "$wish"
      says '^\* +cpu +no_ep '
    done
    if "$program" explain --checkpoint model --scheme fp8_tensor --batch-invariant >out 2>err; then
      fail "batch invariant"
    fi
    says 'batch_invariance +fp8_tensor: one activation scale'
    grep -q '^error: ' err || fail "no error on stderr"
    ;;
  bench)
    cell=(bench --model qwen3-30b-a3b --scheme mxfp4_w4a16 --dtype f32
      --min-samples 1 --max-seconds 0.2)
    succeeds "${cell[@]}" --tokens 1,3 --json
    [[ $(grep -c '"num_tokens": [13],' out) -eq 2 ]] || fail "expected rows of 1 and 3 tokens"
    grep -q '"rows_per_expert":' out || fail "no load"
    # Compared even where no sample was kept; sums in f32 never agree to the last bit.
    [[ $(grep -Ec '"relative_error": ([1-9]|0\.0*[1-9])' out) -eq 2 ]] || fail "not compared"
    for threads in -1 0 1025 99999999999; do
      refuses '--threads' "${cell[@]}" --threads "$threads"
    done
    small=(bench --shape 64x64x8x2 --min-samples 1 --max-seconds 0.05)
    succeeds "${small[@]}" --scheme all --md --tokens 1 --load --heat-map
    says '^\| +64x64x8x2 \| +nvfp4 \|'
    ! grep -q nan out || fail "nan"
    succeeds bench --shape 64x64x1x1 --min-samples 1 --max-seconds 0.05 --tokens 1,3
    says '^64x64x1x1 '
    refuses '--shape' "${small[@]}" --shape 64x64x8
    refuses '--shape' "${small[@]}" --shape 64x64x8x2x1
    refuses 'topk' "${small[@]}" --shape 64x64x8x9
    refuses 'fp9' "${small[@]}" --scheme fp9
    ;;
  tune)
    # Measuring needs a GPU; what comes before does not.
    small=(tune --shape 64x64x8x2 --output tuned.json)
    refuses 'kernel configurations' "${small[@]}" --device cpu
    refuses 'cuda:99' "${small[@]}" --device cuda:99
    refuses '--tokens' "${small[@]}" --tokens 0
    [[ ! -e tuned.json ]] || fail "a file without configurations"
    echo '{"version": 2, "configs": [{}]}' >tuned.json
    refuses 'tuned.json.configs\[0\]' "${small[@]}" --device cpu
    FUSEDMOE_TUNED_CONFIGS=tuned.json succeeds doctor
    says '^tuned configurations +tuned.json.configs\[0\]'
    FUSEDMOE_TUNED_CONFIGS='' succeeds doctor
    says '^tuned configurations +none$'
    ;;
  doctor)
    succeeds doctor
    says '^instruction set +[a-z]'
    says '^cuda +(none: |cuda:0 )'
    FUSEDMOE_CPU_ISA=generic succeeds doctor --json
    says '"instruction set":"generic"'
    ;;
  examples)
    synth gpt_oss_tiny
    program=$examples/example_layer
    succeeds model model/input.safetensors
    says '^cpu\+no_ep mxfp4_w4a16 bf16'
    program=$examples/example_lora
    succeeds model model/input.safetensors
    says '^cpu\+no_ep mxfp4_w4a16 bf16'
    says '^adapter -1: largest change of an output 0$'
    says '^adapter  1: largest change of an output [0-9.]*[1-9]'
    program=$examples/example_engine_routing
    succeeds model model/input.safetensors
    says '^after rank 1: first output -?[0-9]'
    program=$examples/example_cuda_graph
    succeeds model model/input.safetensors
    says '^nothing to do without a GPU: |^sm90\+no_ep mxfp4_w4a16 bf16 .*: first output '
    program=$examples/example_raw_tensors
    succeeds
    says '^layers packed: 1; first outputs: -?[0-9]'
    if [[ -x $examples/example_layer_c ]]; then
      program=$examples/example_layer_c
      succeeds model
      says '^gpt_oss, mxfp4_w4a16: 1 layers with experts'
      says '^first outputs: -?[0-9]'
    fi
    for example in layer lora engine_routing; do
      program=$examples/example_$example
      refuses 'nowhere' nowhere model/input.safetensors
    done
    ;;
  usage)
    succeeds --help
    says 'run .*MoE layer'
    succeeds --version
    says '^[0-9]+\.[0-9]+\.[0-9]+$'
    refuses 'subcommand' --
    refuses 'no-such-option' doctor --no-such-option
    ;;
  *)
    fail "no such case: $situation"
    ;;
esac
