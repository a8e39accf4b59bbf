#!/usr/bin/env bash
# Cases of the other subcommands: see common.sh.
# shellcheck source=tests/cli/common.sh
source "$(dirname "$0")/common.sh"

case $situation in
  compare)
    succeeds synth --config "$configs/qwen3_tiny.json" --tokens 9 --out model
    succeeds compare --checkpoint model --input model/input.safetensors --max-experts 0 \
      --schemes f32,bf16,fp8_channel_token,int4_g32,nvfp4 --json
    says '"num_experts": 100'
    [[ $(grep -c '"relative_error"' out) -eq 5 ]] || fail "expected five schemes"
    succeeds compare --checkpoint model --tokens 3 --repeat 1 --schemes bf16,mxfp8 --dtype f32
    says '^mxfp8 +[0-9.]+ kB +8\.[0-9]+ '
    wrong '^error: --schemes fp9: no such name' compare --checkpoint model --schemes bf16,fp9
    wrong '^error: --layer: was 7; must be a layer with experts: 0$' compare --checkpoint model \
      --schemes bf16 --layer 7
    wrong '^error: --input-name requires --input$' compare --checkpoint model --schemes bf16 \
      --input-name foo
    wrong '^error: --model cannot be used with --layer$' compare --model gpt-oss-20b \
      --schemes bf16 --layer 3
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
    refuses '^error: --scheme: was mxfp8; must be one that has the weights of mxfp4:even: ' run \
      --checkpoint mx --input plain/input.safetensors --output y.safetensors --scheme mxfp8
    wrong '^error: --calibrate cannot be used with scheme int4_g32: it has no static' quantize \
      --checkpoint plain --scheme int4_g32 --calibrate nofile --output other
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
    refuses 'cannot be used together' synth --model gpt-oss-20b --config broken.json --out model
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
    wrong '^error: --layer: was 9; must be a layer with experts: 0$' inspect model --layer 9
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
    wrong '^error: family: was "nobody"; must be a JSON file' families nobody
    wrong '^error: --check cannot be used with --json$' families --check x.json --json
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
    for plan_to in a_file a_pipe a_command; do
      plan=(explain --checkpoint model --save-plan)
      case $plan_to in
        a_file) succeeds "${plan[@]}" /dev/stdout ;;
        a_pipe) "$program" "${plan[@]}" /dev/stdout | cat >out ;;
        a_command) "$program" "${plan[@]}" >(cat) | cat >out ;;
      esac
      says '"prepare_finalize"'
      says '^workspace for 64 tokens: '
    done
    succeeds explain --model deepseek-v3 --json --tokens 5
    says '"num_tokens":5'
    refuses '^error: cuda:99: ' explain --model gpt-oss-20b --device cuda:99
    [[ $(wc -l <err) -eq 1 ]] || fail "more than one sentence"
    wrong '^error: --experts fast: no such' explain --model gpt-oss-20b --experts fast
    wrong '^error: --model cannot be used with --layer$' explain --model gpt-oss-20b --layer 3
    for capability in 9.05 9 9. .9 0.0 Hopper; do
      wrong "^error: --compute-capability: was $capability; must be a compute capability, as 9\.0$" \
        explain --model gpt-oss-20b --compute-capability $capability
    done
    # Of a GPU that is not here, also in a build without CUDA.
    export CUDA_VISIBLE_DEVICES=
    for wish in '--compute-capability 9.0' '--device cuda --compute-capability 9.0' \
      '--device cuda'; do
      # shellcheck disable=SC2086 # words
      succeeds explain --model gpt-oss-20b $wish
      says 'on cuda:0 of compute capability 9\.0$'
      says '^\* +sm90 +no_ep +standard +supported'
      says '^workspace for 64 tokens: 14\.7 MB$'
      says '^kernel configuration for 64 tokens: 256x32k1c1 '
      [[ $(grep -c '_ep\|batched' out) -le 16 ]] || fail "more than sixteen rows"
    done
    unset CUDA_VISIBLE_DEVICES
    refuses '^error: --compute-capability cannot be used with --device cpu: a GPU has one$' \
      explain --model gpt-oss-20b --compute-capability 9.0 --device cpu
    succeeds explain --model gpt-oss-120b --ep 4 --compute-capability 9.0
    says '^rows of 64 tokens a rank on GPUs of one host, as predicted:$'
    says '^\* peer_memory +per_rank dispatch [0-9.]+ us, combine [0-9.]+ us$'
    says '^  all2all +per_rank dispatch '
    options=(--model deepseek-v3 --scheme fp8_block --ep 4 --compute-capability 9.0)
    succeeds explain "${options[@]}" --tokens 8
    says '^\* peer_memory +per_rank dispatch [0-9.]+ us, combine'
    succeeds explain "${options[@]}" --tokens 1024
    says '^\* peer_memory +per_rank dispatch [0-9.]+ us \(rows quantized in [0-9.]+ us\), combine'
    succeeds explain "${options[@]}" --tokens 1024 --dispatch-dtype bf16
    says '^\* peer_memory +per_rank dispatch [0-9.]+ us, combine'
    succeeds explain "${options[@]}" --tokens 1024 --json
    says '"path":"peer_memory","quantize_us":[0-9.]+,"quantized":true'
    succeeds explain --model gpt-oss-120b --ep 64 --combine per_slot
    says '^64 ranks: tp 1, dp 64, ep 64; rank 0 has 2 experts of 2880 x 2880; per_slot'
    says '^\* +cpu +all2all '
    succeeds explain --model gpt-oss-120b --ep 64 --scheme mxfp4_mxfp8 --dispatch-dtype e4m3
    says '^\* +cpu +all2all '
    refuses '^error: --dispatch-dtype needs several ranks' explain --model gpt-oss-120b \
      --dispatch-dtype e4m3
    succeeds explain --model gpt-oss-120b --tp 4
    says '^\* +cpu +no_ep '
    succeeds explain --matrix
    says '^\| w4a8 +\| i4, .* \| yes +\| yes +\| '
    for wish in --hooks --monolithic; do
      succeeds explain --checkpoint model "$wish"
      says '^\* +cpu +no_ep '
    done
    # Layers that differ in their scheme, each with its own table.
    whole_groups
    succeeds synth --config whole.json --layers 3 --tokens 9 --out source
    succeeds quantize --checkpoint source --scheme fp8_channel_token --layout compressed-tensors \
      --output mixed
    weights='"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}'
    {
      sed '$ s/}$/,/' source/config.json
      echo '"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized",'
      echo '"config_groups": {"a": {"targets": ["re:.*layers.1.mlp.*"],' "$weights"'},'
      echo '"b": {"targets": ["Linear"],' "$weights", '"input_activations":'
      echo '{"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true}}}}}'
    } >mixed/config.json
    succeeds explain --checkpoint mixed
    [[ $(grep '^layer' out) == $'layers {0,2}\nlayer 1' ]] || fail "other layers"
    says '^qwen3_moe: .* fp8_channel_token,'
    says '^qwen3_moe: .* fp8_channel_w8a16,'
    succeeds explain --checkpoint mixed --json
    [[ $(wc -l <out) -eq 2 ]] || fail "expected two objects"
    says '"layers":\[0,2\].*"scheme":"fp8_channel_token"'
    succeeds explain --checkpoint mixed --layer 1 --save-plan plan.json
    [[ $(grep -c '^qwen3_moe' out) -eq 1 ]] || fail "more than one layer"
    grep -q fp8_channel_w8a16 plan.json || fail "the plan of another layer"
    refuses '^error: --save-plan needs --layer' explain --checkpoint mixed --save-plan plan.json
    wrong '^error: --layer: was 3; must be a layer with experts: \{0-2\}$' explain --checkpoint mixed --layer 3
    if "$program" explain --checkpoint model --scheme fp8_tensor --batch-invariant >out 2>err; then
      fail "batch invariant"
    fi
    says 'batch_invariance +fp8_tensor: one activation scale'
    grep -q '^error: ' err || fail "no error on stderr"
    "$program" explain --checkpoint model --scheme fp8_tensor --batch-invariant >out 2>&1 || true
    tail -n 1 out | grep -q '^error: .*: the rows above say why$' || fail "no rows above"
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
    # Whether a sample is kept or none: no time is 0.
    succeeds bench --shape 64x64x8x2 --min-samples 1 --max-seconds 0.001 --tokens 1,2,3,4 --json
    ! grep -Eq '"(median_ms|floor_ms)": 0\.0,' out || fail "a time of 0"
    succeeds bench --shape 64x64x1x1 --min-samples 1 --max-seconds 0.05 --tokens 1,3
    says '^ *model +scheme +dtype .* samples$'  # all columns where no terminal sets a limit
    says '^64x64x1x1 '
    COLUMNS=70 succeeds bench --shape 64x64x1x1 --min-samples 1 --max-seconds 0.05 --tokens 1
    says '^ *model +scheme +tokens +median_ms +floor_ms +time/floor'
    ! grep -q '.\{71\}' out || fail "wider than there are columns"
    COLUMNS=70 succeeds bench --shape 64x64x1x1 --min-samples 1 --max-seconds 0.05 --tokens 1 --wide
    says ' samples$'
    succeeds "${small[@]}" --tokens 3 --record-routing drawn.safetensors
    succeeds "${small[@]}" --tokens 3 --record-routing again.safetensors
    cmp drawn.safetensors again.safetensors || fail "two draws differ"
    succeeds "${small[@]}" --tokens 3 --replay-routing drawn.safetensors
    succeeds "${small[@]}" --tokens 3 --skew zipf --record-routing zipf.safetensors
    ! cmp -s drawn.safetensors zipf.safetensors || fail "zipf draws as balanced"
    refuses '--record-routing.*--replay-routing' "${small[@]}" --tokens 3 \
      --record-routing new.safetensors --replay-routing drawn.safetensors
    # What ranks have no use for.
    while read -r option because; do
      # shellcheck disable=SC2086 # words
      wrong "^error: $option cannot be used with --ep, --tp and --dp: $because" "${small[@]}" --ep 2 \
        --tokens 1 $option
    done < <(printf '%s\n' '--layer its' '--csv ranks' '--md ranks' '--wide ranks' '--load ranks' \
      '--heat-map ranks')
    for option in '--skew zipf' '--scheme bf16,fp8_tensor' '--scheme all' '--experts no_ep,all2all'; do
      # shellcheck disable=SC2086 # words
      wrong "^error: ${option% zipf} cannot be used with --ep, --tp and --dp: " "${small[@]}" --ep 2 \
        --tokens 1 $option
    done
    succeeds bench --columns
    says '^time/floor +median over samples; 1 is the limit$'
    succeeds "${small[@]}" --layer --dtype f32 --tokens 1,3 --json
    [[ $(grep -Ec '"relative_error": [1-9]' out) -eq 2 ]] || fail "the layer was not compared"
    refuses '--layer' "${small[@]}" --layer --skew zipf
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
    refuses '--measured-by need each other' "${small[@]}" --report report.json
    [[ ! -e tuned.json ]] || fail "a file without configurations"
    echo '{"version": 2, "configs": [{}]}' >tuned.json
    refuses 'tuned.json.configs\[0\]' "${small[@]}" --device cpu
    FUSEDMOE_TUNED_CONFIGS=tuned.json succeeds doctor
    says '^tuned configurations +tuned.json.configs\[0\]'
    # A report is a file of tuned configurations, which say who measured them.
    key='"hidden":64,"intermediate":64,"num_local_experts":8,"topk":2,"num_tokens":8,"time_us":1.5'
    echo '{"version": 2, "configs": [{"device":"A GPU","experts":"sm80","scheme":"bf16","config":"a",' \
      "$key"',"measured_by":"Ada L."}], "report": {"cells": []}}' >report.json
    FUSEDMOE_TUNED_CONFIGS=report.json succeeds doctor
    says '^tuned configurations +1 in report.json, 1 measured by Ada L\.$'
    FUSEDMOE_TUNED_CONFIGS='' succeeds doctor
    says '^tuned configurations +none$'
    ;;
  doctor)
    succeeds doctor
    says '^instruction set +[a-z]'
    says '^cuda +(none: |cuda:0 )'
    says '^memory +[0-9.]+ GB$'
    FUSEDMOE_CPU_ISA=generic succeeds doctor --json
    says '"instruction_set":"generic".*"threads":[0-9]+,.*"memory_bytes":[0-9]+,'
    says '"numa_nodes":\[.*"cuda":\{"summary":".*"devices":\[.*"tuned_configurations":\{"count":'
    if unshare -r -m true 2>err; then
      # shellcheck disable=SC2016 # of the shell that is started
      unshare -r -m bash -c 'mount --bind /dev/null /proc/meminfo && "$1" doctor --json' bash \
        "$program" >out
      says '"threads":'
      ! grep -q memory out || fail "memory that nobody knows"
    fi
    mkdir -p nodes/node0 nodes/node7
    echo 0-8191 >nodes/node7/cpulist
    echo >nodes/node0/cpulist
    FUSEDMOE_NUMA_NODES=nodes succeeds doctor
    says '^numa nodes +node 7 \([0-9]+ CPUs\)$'
    FUSEDMOE_NUMA_NODES='' succeeds doctor
    says '^numa nodes +none known$'
    succeeds doctor --comm
    says '^mpi +(Open MPI|MPICH|Intel|built without MPI)'
    says '^threads +4 ranks exchanged numbers in [0-9.]+ s$'
    says '^tcp +2 ranks exchanged numbers in [0-9.]+ s$'
    says '^file rendezvous +2 processes exchanged numbers in [0-9.]+ s$'
    says "^shared memory +2 processes read each other's memory in [0-9.]+ s\$"
    succeeds doctor --comm --json
    says '"threads":\{"passed":true,"seconds":[0-9.e-]+\}'
    TMPDIR=missing succeeds doctor --comm
    says "^file rendezvous +no folder for temporary files: see TMPDIR$"
    says "^shared memory +no folder for temporary files: see TMPDIR$"
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
    program=$examples/example_engine
    succeeds
    says '^cpu\+no_ep: 786432 bytes of packed weights, [1-9][0-9]* of workspace$'
    says '^cancelled$'
    mv out first
    succeeds  # from the file
    cmp out first || fail "other outputs from the file"
    [[ $(sed -n 's/^again: //p' out) == "$(sed -n 's/^with expert 6: //p' out)" ]] ||
      fail "other outputs after a cancelled forward"
    program=$examples/example_two_devices
    succeeds
    says '^experts 4 to 7: cpu\+no_ep bf16 bf16'
    says '^differs from one layer by [0-9.e-]+ of the largest output$'
    program=$examples/example_raw_tensors
    succeeds
    says '^layers packed: 1; first outputs: -?[0-9]'
    if [[ -x $examples/example_layer_c ]]; then
      program=$examples/example_layer_c
      succeeds model
      says '^gpt_oss, mxfp4_w4a16: 1 layers with experts'
      says '^first outputs: -?[0-9]'
      program=$examples/example_engine_c
      succeeds
      says '^info: cpu\+no_ep runs 8 experts, topk 2, .* 2 threads, with hooks, with an expert map$'
      says '^first output: .*; 32 tokens for expert 0$'
      says '^with expert 6: .*; 96 rows$'
      says '^cancelled: options.executor.run returned 1, which gives the call up$'
      mv out first
      succeeds  # from the file
      cmp out first || fail "other outputs from the file"
      [[ $(sed -n 's/^again: //p' out) == "$(sed -n 's/^with expert 6: \(.*\);.*/\1/p' out)" ]] ||
        fail "other outputs after a forward that was given up"
    fi
    for example in layer lora engine_routing; do
      program=$examples/example_$example
      refuses 'nowhere' nowhere model/input.safetensors
    done
    ;;
  *)
    fail "no such case: $situation"
    ;;
esac
