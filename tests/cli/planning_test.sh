#!/usr/bin/env bash
# Cases of subcommands that plan for ranks, which need not be here: see common.sh.
# shellcheck source=tests/cli/common.sh
source "$(dirname "$0")/common.sh"

case $situation in
  balance)
    succeeds bench --shape 64x64x16x2 --min-samples 1 --max-seconds 0.05 --tokens 64 --skew zipf \
      --record-routing ids.safetensors
    plan=(balance --routing ids.safetensors --ep 4)
    succeeds "${plan[@]}" --output moved.json
    says '^moved.json: 16 experts and 0 copies on 4 ranks, [0-9]+ of them moved$'
    says '^busiest rank over the mean: [2-4]\.[0-9]+ before, 1\.[0-9]+ after$'
    grep -Eq '^\{"num_experts":16,"num_ranks":4,"physical_to_logical":\[([0-9]+,){15}[0-9]+\],' \
      moved.json || fail "no placement"
    succeeds "${plan[@]}" --placement moved.json --output again.json --json
    says '"before":1\.[0-9]+,"after":1\.[0-9]+,"moves":0\}$'
    cmp moved.json again.json || fail "what is balanced moves"
    succeeds "${plan[@]}" --redundant 8 --hosts 2 --groups 4 --output copies.json
    says '^copies.json: 16 experts and 8 copies on 4 ranks, '
    succeeds "${plan[@]}" --redundant 8 --placement moved.json --output more.json
    wrong '^error: --redundant: was 3; must be a number such as 4, so that 4 ranks' "${plan[@]}" \
      --redundant 3 --output other.json
    wrong '^error: --placement: was 16 experts on 4 ranks; must be 16 experts on 8' balance \
      --routing ids.safetensors --ep 8 --placement moved.json --output other.json
    wrong '^error: --groups requires --hosts$' "${plan[@]}" --groups 4 --output other.json
    refuses '^error: cannot open nofile: ' balance --routing nofile --ep 4 --output other.json
    synth qwen3_tiny
    wrong '^error: --hosts: was 3; must be a divisor of the number of ranks, 4$' "${plan[@]}" \
      --hosts 3 --output other.json
    refuses '^error: model/input.safetensors does not say how many experts there are' balance --routing model/input.safetensors --ep 4 --output other.json
    [[ ! -e other.json ]] || fail "a file of a run that failed"
    ;;
  simulate)
    small=(--shape 64x64x16x2 --min-samples 1 --max-seconds 0.05)
    # On a busy machine few tokens may take as long as many.
    if "$program" bench "${small[@]}" --ep 2 --tokens 1,4096 --calibrate costs.json >out 2>err; then
      grep -q '"source": "measured: bench --ep 2 on cpu, bf16"' costs.json || fail "no costs"
    else
      grep -Eq '^error: samples: .* more time for more bytes$' err || fail "another error"
    fi
    cat >costs.json <<'COSTS'
{"peer_memory": {"dispatch": {"floor_us": 1, "gigabytes_per_second": 1, "source": "a"},
                 "per_rank": {"floor_us": 1, "gigabytes_per_second": 1},
                 "per_slot": {"floor_us": 1, "gigabytes_per_second": 1}},
 "between_hosts": {"floor_us": 2, "gigabytes_per_second": 3, "source": "b"},
 "experts": {"gigabytes_per_second": 4, "teraflops": 5, "source": "c"}}
COSTS
    plan=(simulate --shape 64x64x16x2 --costs costs.json --tokens 64)
    succeeds "${plan[@]}" --ep 2,16
    says '^ +2 +1 +64 .* us +0\.[0-9]+ +0\.000 +1\.[0-9]+$'
    says '^ +16 +2 +64 '
    says '^peer_memory dispatch within a host: 1.0 us and 1.0 GB/s \(a\)$'
    says '^all2all per_rank within a host: .* H200'
    says '^between hosts: 2.0 us and 3.0 GB/s \(b\)$'
    says '^experts: 4 GB/s and 5 TFLOP/s \(c\)$'
    succeeds simulate --model gpt-oss-20b --ep 8 --hosts 4 --tokens 8 --json
    says '"ranks":8,"hosts":4,"num_tokens":8,"dispatch_us":'
    succeeds simulate --model deepseek-v3 --scheme fp8_block --ep 4 --tokens 8,1024
    says '^ +4 +1 +8 +[0-9.]+ us +[0-9.]+ us '
    says '^ +4 +1 +1024 +[0-9.]+ us\* *[0-9.]+ us '
    says '^\* rows are quantized before they travel, which is in dispatch: 7.0 us and 3000.0 GB/s '
    succeeds bench "${small[@]}" --tokens 64 --skew zipf --record-routing ids.safetensors
    succeeds balance --routing ids.safetensors --ep 4 --output moved.json
    succeeds "${plan[@]}" --ep 4 --routing ids.safetensors --placement moved.json
    wrong '^error: --placement: was one of 4 ranks; must be of the 8 of --ep$' "${plan[@]}" --ep 8 \
      --placement moved.json
    wrong '^error: --placement: was one of 16 experts; must be of the 8 of the layer$' simulate \
      --shape 64x64x8x2 --ep 4 --placement moved.json
    refuses '^error: costs.json: placement.between_hosts is no member of a placement$' "${plan[@]}" --ep 4 \
      --placement costs.json
    wrong '^error: --dispatch-dtype: was f64; must be f32, ' "${plan[@]}" --ep 4 --dispatch-dtype f64
    refuses '^error: --dispatch-dtype e4m3: experts of bf16 read rows of bf16' simulate \
      --shape 64x64x16x2 --scheme bf16 --ep 2 --dispatch-dtype e4m3
    refuses '^error: --dispatch-dtype i8: ' simulate --shape 128x128x16x2 --scheme fp8_block \
      --ep 2 --dispatch-dtype i8
    wrong '^error: --shape 64x64x8x9: router.topk: was 9; ' simulate --shape 64x64x8x9 --ep 4
    wrong '^error: --hosts: was 3; must be a divisor of the number of ranks, 4$' "${plan[@]}" --ep 4 --hosts 3
    echo '{"all2all": {"dispatch": {"floor_us": 1}}}' >half.json
    refuses '^error: half.json: all2all.dispatch.gigabytes_per_second: was missing; must be a number above 0$' \
      simulate --shape 64x64x16x2 --ep 2 --costs half.json
    echo '{"dispatch": {"floor_us": 1}}' >old.json
    refuses '^error: old.json: costs: was without peer_memory, all2all and ' \
      simulate --shape 64x64x16x2 --ep 2 --costs old.json
    wrong '^error: --rows-only cannot be used with --calibrate$' bench "${small[@]}" --ep 2 --tokens 1,8 --rows-only \
      --calibrate other.json
    wrong '^error: --calibrate needs several ranks: --ep or --dp$' bench "${small[@]}" --calibrate other.json
    [[ ! -e other.json ]] || fail "a file of a run that failed"
    ;;
  *)
    fail "no such case: $situation"
    ;;
esac
