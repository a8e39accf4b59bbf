#!/usr/bin/env bash
# test.sh PROGRAM CONFIG_DIR WORK_DIR CASE EXAMPLE: one situation of the real program (or of the
# README's example) on a tiny checkpoint.
set -euo pipefail
program=$1 configs=$2 work=$3/$4 situation=$4 example=$5
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
    for experts in cpu reference cpu_batched reference_batched cpu_monolithic; do
      for dtype in f32 bf16 f16; do
        succeeds "${run_args[@]}" --experts "$experts" --dtype "$dtype" --check 3 \
          --threads 1
        says "^$experts\\+.* $dtype "
      done
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
  run_json)
    synth gpt_oss_tiny
    succeeds "${run_args[@]}" --json --check 2 --repeat 3
    [[ $(wc -l <out) -eq 1 ]] || fail "more than one line"
    says '"passed":true.*"expert_load":\[.*"ms":'
    ;;
  run_leaves_no_output_on_failure)
    synth gpt_oss_tiny
    refuses 'nowhere' "${run_args[@]}" --checkpoint nowhere
    refuses 'nowhere' "${run_args[@]}" --input nowhere
    refuses 'hidden_state_typo' "${run_args[@]}" --input-name hidden_state_typo
    refuses 'cuda' "${run_args[@]}" --device cuda:0
    refuses 'device.*tpu' "${run_args[@]}" --device tpu
    refuses 'dtype.*fp8' "${run_args[@]}" --dtype fp8
    refuses 'fastest' "${run_args[@]}" --experts fastest
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
  quantize)
    succeeds synth --config "$configs/qwen3_tiny.json" --tokens 9 --out plain
    succeeds quantize --checkpoint plain --scheme nvfp4 --output model
    says '^model: nvfp4 in the layout of modelopt, .* in .* s$'
    succeeds "${run_args[@]}" --check 9
    says '^9 of 9 rows against reference .*: passed$'
    succeeds quantize --checkpoint plain --scheme int4_g32_zp --layout awq --output awq --json
    says '"layout":"awq".*"scheme":"int4_g32_zp"'
    refuses 'layout: was awq' quantize --checkpoint plain --scheme fp8_block --layout awq \
      --output other
    refuses 'one of .*nvfp4' quantize --checkpoint plain --scheme int3 --output other
    refuses 'a new or empty directory' quantize --checkpoint plain --scheme nvfp4 --output awq
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
    refuses 'nowhere' inspect nowhere
    refuses '--layer.*9' inspect model --layer 9
    ;;
  explain)
    synth gpt_oss_tiny
    succeeds explain --checkpoint model
    says '^\* +cpu +no_ep '
    says '^ +reference +no_ep '
    says '^workspace for 64 tokens: '
    succeeds explain --model deepseek-v3 --json --tokens 5
    says '"num_tokens":5'
    if "$program" explain --model gpt-oss-20b --device cuda:0 >out 2>err; then fail "cuda"; fi
    says 'no CUDA kernels'
    grep -q '^error: ' err || fail "no error on stderr"
    ;;
  bench)
    cell=(bench --model qwen3-30b-a3b --scheme mxfp4_w4a16 --dtype f32
      --min-samples 1 --max-seconds 0.2)
    succeeds "${cell[@]}" --tokens 1,3 --json
    [[ $(grep -c '"num_tokens": [13],' out) -eq 2 ]] || fail "expected rows of 1 and 3 tokens"
    # Compared even where no sample was kept; sums in f32 never agree to the last bit.
    [[ $(grep -Ec '"relative_error": ([1-9]|0\.0*[1-9])' out) -eq 2 ]] || fail "not compared"
    for threads in -1 0 1025 99999999999; do
      refuses '--threads' "${cell[@]}" --threads "$threads"
    done
    ;;
  doctor)
    succeeds doctor
    says '^instruction set +[a-z]'
    says '^cuda +(none: |cuda:0 )'
    FUSEDMOE_CPU_ISA=generic succeeds doctor --json
    says '"instruction set":"generic"'
    ;;
  example)
    synth gpt_oss_tiny
    program=$example
    succeeds model model/input.safetensors
    says '^cpu\+no_ep mxfp4_w4a16 bf16'
    refuses 'nowhere' nowhere model/input.safetensors
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
