#!/usr/bin/env bash
# Cases of fusedmoe run: see common.sh.
# shellcheck source=tests/cli/common.sh
source "$(dirname "$0")/common.sh"

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
  run_checks_quantized_activations)
    # Some numbers before GEMM 2 get the code next to the reference's, as sums differ in their order.
    sed 's/"num_experts": 100/"num_experts": 8/; s/: 40/: 128/; s/"hidden_size": 64/"hidden_size": 128/' \
      "$configs/qwen3_tiny.json" >small.json
    succeeds synth --config small.json --tokens 300 --out model
    checks() {
      for dtype in f32 f16 bf16; do
        succeeds run --checkpoint quantized --input model/input.safetensors \
          --output out.safetensors --check 300 --dtype "$dtype" "$@"
        says ': passed$'
        cat out >>all
      done
    }
    for scheme in int8_w8a8 fp8_tensor fp8_tensor_static fp8_channel_token fp8_block w4a8 mxfp8 nvfp4 \
      mxfp4_w4a16 int4_g32; do
      rm -rf quantized
      succeeds quantize --checkpoint model --scheme $scheme --output quantized
      checks
      case $scheme in
        mxfp4_w4a16) others='mxfp4 mxfp4_mxfp8 mxfp4_fp8 mxfp4_int8 mxfp4_int16' ;;
        int4_g32) others='int4_g32_int8 int4_g32_int16' ;;
        *) others= ;;
      esac
      for other in $others; do checks --scheme $other; done
    done
    grep -q 'in f32: .* where codes of activations differ' all || fail "no code differs"
    ;;
  run_chosen_layer)
    synth gpt_oss_tiny --layers 2
    succeeds "${run_args[@]}" --layer 1 --check 9
    wrong '^error: --layer: was 7; must be a layer with experts: \{0-1\}$' "${run_args[@]}" --layer 7
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
    succeeds "${run_args[@]}" --batch-invariant --scheme mxfp4:ocp
    for dtype in e2m1 bf16; do  # rows as they travel: codes, or as they are
      succeeds "${run_args[@]}" --output ranks.safetensors --batch-invariant --scheme mxfp4:ocp \
        --ep 3 --dispatch-dtype "$dtype"
      cmp <(tensor_data out.safetensors) <(tensor_data ranks.safetensors) || fail "other bits"
    done
    succeeds synth --config "$configs/qwen3_tiny.json" --tokens 9 --out plain
    succeeds quantize --checkpoint plain --scheme fp8_tensor --output tensor_scales
    for ranks in '--ep 3' '--tp 2'; do
      # shellcheck disable=SC2086
      succeeds "${run_args[@]}" --checkpoint tensor_scales \
        --input plain/input.safetensors --output ranks.safetensors --check 9 $ranks
      says 'tolerance 1e-01: passed$'
    done
    refuses 'dispatch_dtype e4m3: experts of mxfp4_w4a16 read rows of bf16' "${run_args[@]}" --ep 3 \
      --dispatch-dtype e4m3
    refuses '^error: --dispatch-dtype: was fp9' "${run_args[@]}" --ep 3 --dispatch-dtype fp9
    refuses '^error: --ep: was 3; must be 2' "${run_args[@]}" --ep 3 --tp 2
    refuses 'at least one unit for each of 7 ranks' "${run_args[@]}" --tp 7
    succeeds bench --ep 2 --shape 256x128x8x2 --tokens 4 --max-seconds 0.1 --min-samples 2
    says '^all2all +exact +4 '
    says '^allgather_reducescatter +fixed +4 '
    says ' step +experts +exposed$'
    says '^link: [0-9.]+ GB/s by memcpy'
    says ' sent MB +link +back MB +link '
    succeeds bench --ep 2 --model gpt-oss-20b --rows-only --tokens 4 --max-seconds 0.1 \
      --min-samples 2
    says 'memcpy +ratio$'
    sent=()
    for dtype in bf16 e4m3; do
      succeeds bench --ep 2 --shape 256x128x8x2 --scheme fp8_block --rows-only --tokens 4 --json \
        --max-seconds 0.1 --min-samples 2 --dispatch-dtype "$dtype"
      says '"dispatch_dtype":"'"$dtype"'"'
      sent+=("$(grep -o '"sent_bytes":[0-9]*' out | head -n 1 | grep -o '[0-9]*$')")
    done
    # A row takes 512 bytes, or 256 and two scales of 4.
    ((sent[0] > 0 && sent[0] * 264 == sent[1] * 512)) || fail "sent ${sent[*]} bytes"
    small=(bench --shape 256x128x8x2 --tokens 5 --max-seconds 0.05 --min-samples 2)
    # The same tokens on all ranks: no rows travel, each rank sends its share of the sums.
    for ranks in '--tp 2' '--tp 2 --ep 2'; do
      # shellcheck disable=SC2086
      succeeds "${small[@]}" $ranks
      says '^2 ranks \(tp 2(, ep)?\) over threads'
      says ' tokens +combine +bare +ratio +back MB +link +memcpy +ratio +step +experts +exposed$'
      says '^no_ep +fixed +5 +[0-9.]+ us +[0-9.]+ us +[0-9.]+ +0\.003 '
      says '^All ranks have the same tokens'
    done
    succeeds "${small[@]}" --tp 2 --json
    says '"tp":2,"dp":1,"expert_parallel":false.*"returned_bytes":3072.0.*"step_us":'
    ! grep -q dispatch_us out || fail "dispatch, though nothing travels"
    succeeds "${small[@]}" --dp 2
    says '^2 ranks \(dp 2\) over threads'
    says '^allgather_reducescatter +exact +5 .* 0.003 .* 0.003 '
    ! grep -q '^all2all' out || fail "all2all without expert parallelism"
    # Rows go to all four ranks, and come back complete; or to one, and the sums of two are added.
    succeeds "${small[@]}" --tp 2 --dp 2 --ep 4 --json
    says '"transport":"all2all","sizes":"fixed",.*"sent_bytes":7680.0,.*"returned_bytes":7680.0,'
    grep -o '"transport":"allgather_reducescatter","sizes":"fixed".*' out |
      grep -q '"sent_bytes":2560.0,.*"returned_bytes":5632.0,' || fail "bytes of sums"
    refuses '^error: --rows-only needs rows that travel' "${small[@]}" \
      --tp 2 --rows-only
    refuses '^error: --rows-only needs several ranks' "${small[@]}" --rows-only
    refuses '^error: --no-peer-memory needs several ranks' "${small[@]}" --no-peer-memory
    refuses '^error: --peer-memory: with all2all the way is read in place$' "${small[@]}" --ep 2 --peer-memory
    wrong '^error: --peer-memory cannot be used with --no-peer-memory$' "${small[@]}" --ep 2 \
      --peer-memory --no-peer-memory
    succeeds "${small[@]}" --ep 2 --no-peer-memory
    refuses '^error: --experts all2all does not serve these ranks; .* all2all \(every rank has all tokens' "${small[@]}" \
      --tp 2 --experts all2all
    refuses '^error: --ep: was 3; must be 2' "${small[@]}" --tp 2 --ep 3
    refuses '^error: --dispatch-dtype needs several ranks' "${small[@]}" --dispatch-dtype e4m3
    ;;
  run_joins_launched_ranks)
    synth gpt_oss_tiny
    succeeds "${run_args[@]}" --batch-invariant
    cp out.safetensors one.safetensors
    port=$((20000 + $$ % 12000))  # below those that the system gives to connections
    # launched SIZE RANK_VARIABLE SIZE_VARIABLE ARGS...: so many processes, as a launcher starts them.
    # One of the rank $wrong_rank reads another checkpoint.
    wrong_rank=none
    launched() {
      local size=$1 rank args
      for ((rank = 0; rank < size; ++rank)); do
        args=("${@:4}")
        [[ $rank != "$wrong_rank" ]] || args+=(--checkpoint other)
        env "$2=$rank" "$3=$size" MASTER_ADDR=127.0.0.1 MASTER_PORT="$port" "$program" \
          "${args[@]}" >"out$rank" 2>"err$rank" &
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
    # A rank that computes something else: with --ep and --dp it routes its tokens otherwise, too.
    succeeds synth --config "$configs/gpt_oss_tiny.json" --tokens 9 --seed 5 --out other
    wrong_rank=1
    for ranks in '--ep 2' '--dp 2' '--tp 2' '--tp 2 --ep 2'; do
      # shellcheck disable=SC2086
      launched 2 RANK WORLD_SIZE "${run_args[@]}" --output wrong.safetensors --check 9 $ranks
      [[ $status -ne 0 && ! -e wrong.safetensors ]] || fail "a wrong rank of $ranks passes"
      grep -q '^rank 0: error: .* against reference .* FAILED' err || fail "no reason of $ranks"
      [[ $ranks == --tp* ]] || grep -q 'rows chose other experts' err || fail "routing of $ranks"
    done
    wrong_rank=none
    launched 2 RANK WORLD_SIZE bench --ep 2 --model gpt-oss-20b --rows-only --tokens 4 \
      --max-seconds 0.1 --min-samples 2 --json
    [[ $status -eq 0 && $(wc -l <out) -eq 1 ]] || fail "one line of JSON"
    says '"backend":"tcp".*"dispatch_share_of_link":.*"sent_bytes":\[[0-9.]+,[0-9.]+\].*"memcpy_us":'
    launched 2 RANK WORLD_SIZE bench --tp 2 --shape 256x128x8x2 --tokens 4 --max-seconds 0.1 \
      --min-samples 2 --json
    [[ $status -eq 0 && $(wc -l <out) -eq 1 ]] || fail "one line of JSON"
    says '"tp":2,.*"backend":"tcp".*"transport":"no_ep"'
    launched 2 RANK WORLD_SIZE "${run_args[@]}" --ep 3
    grep -q '^rank 1: error: .* make 3 ranks, but .* has started 2 processes' err || fail "3 of 2 ranks"
    # A program for GPUs has MPI only if that was asked for; the one without CUDA always has it.
    [[ ! -x ${program}_cpu ]] || program+=_cpu
    if "$program" doctor --comm | grep -q '^mpi  *Open MPI'; then
      export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
      rm ranks.safetensors
      mpirun --oversubscribe -n 4 "$program" "${run_args[@]}" --output ranks.safetensors \
        --batch-invariant --ep 4 --tp 2 --check 9 >out 2>err || fail "mpirun"
      [[ $(wc -l <out) -eq 2 ]] || fail "one rank prints"
      cmp <(tensor_data one.safetensors) <(tensor_data ranks.safetensors) || fail "other bits"
    fi
    ;;
  run_bounded_workspace)
    succeeds synth --config "$configs/qwen3_tiny.json" --tokens 3000 --out model
    run_args+=(--batch-invariant)  # parts have fewer rows an expert
    succeeds "${run_args[@]}"
    succeeds "${run_args[@]}" --output again.safetensors --max-workspace 1 --threads 2 --check 3
    cmp <(tensor_data out.safetensors) <(tensor_data again.safetensors) || fail "other bits"
    refuses '--max-workspace' "${run_args[@]}" --max-workspace 0
    ;;
  run_random_input)
    synth gpt_oss_tiny
    rm model/input.safetensors
    succeeds run --checkpoint model --tokens 5 --check 5
    says '^cpu.* tokens=5  first \(cold\) [0-9.]+ ms, then [0-9.]+ ms$'
    [[ $(find . -name '*.safetensors') == ./model/model.safetensors ]] || fail "an output file"
    for seed in 0 0 1; do
      succeeds run --checkpoint model --tokens 5 --seed "$seed" --output "$seed.safetensors"
      [[ ! -e first ]] || cmp -s first <(tensor_data "$seed.safetensors") ||
        [[ $seed -eq 1 ]] || fail "other bits"
      tensor_data "$seed.safetensors" >first
    done
    ! cmp -s <(tensor_data 0.safetensors) <(tensor_data 1.safetensors) || fail "the same bits"
    ;;
  run_json)
    synth gpt_oss_tiny
    succeeds "${run_args[@]}" --json --check 2 --repeat 3
    [[ $(wc -l <out) -eq 1 ]] || fail "more than one line"
    says '"passed":true.*"cold_ms":[0-9.]+,.*"load":\{.*"rows_per_expert":\[.*"times_ms":\[([0-9.]+,){3}[0-9.]+\],"warm_ms":'
    ;;
  run_leaves_no_output_on_failure)
    synth gpt_oss_tiny
    refuses 'nowhere' "${run_args[@]}" --checkpoint nowhere
    refuses 'nowhere' "${run_args[@]}" --input nowhere
    refuses 'hidden_state_typo' "${run_args[@]}" --input-name hidden_state_typo
    refuses 'cuda' "${run_args[@]}" --device cuda:99
    refuses 'device.*tpu' "${run_args[@]}" --device tpu
    refuses 'dtype.*fp8' "${run_args[@]}" --dtype fp8
    wrong '^error: --experts fastest: no such implementation; there are: cpu, reference, sm80, sm89, sm90$' \
      "${run_args[@]}" --experts fastest
    for threads in -1 0 1025 99999999999; do
      refuses '--threads' "${run_args[@]}" --threads "$threads"
    done
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
      refuses '--output .* is (a file of the checkpoint|the file of --input)' "${run_args[@]}" --output "$file"
    done
    mkfifo pipe
    refuses '--output pipe is not a regular file' "${run_args[@]}" --output pipe
    refuses '--output model is not a regular file' "${run_args[@]}" --output model
    refuses '--output /dev/null is not a regular file' "${run_args[@]}" --output /dev/null
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
    refuses '^error: --experts cannot be used with --plan$' "${run_args[@]}" --plan plan.json --experts cpu
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
      calibrate=()
      [[ $scheme != nvfp4 ]] || calibrate=(--calibrate float/input.safetensors)
      succeeds quantize --checkpoint float --scheme "$scheme" --output model "${calibrate[@]}"
      for experts in cpu+no_ep cpu+batched reference+no_ep; do
        succeeds "${run_args[@]}" --input float/input.safetensors --experts "$experts" --check 9
        says "^${experts/+/\\+} $scheme bf16"
      done
      # Each with the arithmetic of its own: hooks see rounded rows, ranks scale their slices.
      for wish in --hooks --monolithic '--tp 2' '--ep 2'; do
        # shellcheck disable=SC2086 # words
        succeeds "${run_args[@]}" --input float/input.safetensors --check 9 $wish
      done
    done
    # An expert of NVFP4 that was not calibrated is told of once, not for each rank and the check.
    file=model/model.safetensors
    header=$(od -An -t u8 -N 8 "$file")
    begin=$(head -c $((8 + header)) "$file" | grep -ao 'experts\.1\.down_proj\.input_scale":{[^}]*' |
      grep -o 'data_offsets":\[[0-9]*' | grep -o '[0-9]*$' | head -n 1)
    head -c 4 /dev/zero | dd of="$file" bs=1 seek=$((8 + header + begin)) conv=notrunc status=none
    for wish in '' '--tp 2' '--ep 2'; do
      # shellcheck disable=SC2086 # words
      succeeds "${run_args[@]}" --input float/input.safetensors --check 9 $wish
      [[ $(grep -c 'experts\.1\.down_proj\.input_scale is 0' err) == 1 ]] || fail "not one warning"
    done
    ;;
  *)
    fail "no such case: $situation"
    ;;
esac
