#!/usr/bin/env bash
# What the program says about itself: help, wrong command lines, the manual, completion. See common.sh.
# shellcheck source=tests/cli/common.sh
source "$(dirname "$0")/common.sh"

case $situation in
  usage)
    succeeds --help
    says 'run .*MoE layer'
    says '^  FUSEDMOE_CPU_ISA +'
    succeeds --version
    says '^[0-9]+\.[0-9]+\.[0-9]+$'
    wrong '^Usage: fusedmoe COMMAND'
    wrong '^error: unknown option --chekpoint; did you mean --checkpoint\?$' run --chekpoint model
    wrong '^error: unknown option --no-such-option$' doctor --no-such-option
    wrong '^error: unknown command rnu; did you mean run\?$' rnu --checkpoint model
    wrong '^error: unknown command unlike; there are: run, ' unlike
    wrong '^error: unknown command help; did you mean --help\?$' help run
    wrong '^error: unknown command version; did you mean --version\?$' version
    wrong '^error: unknown option --vresion; did you mean --version\?$' --vresion
    wrong '^error: --skew zpif: .* balanced, zipf; did you mean zipf\?$' bench --shape 1x1x1x1 --skew zpif
    wrong '^error: unknown option -c$' run -c model
    wrong '^error: unknown option --output; did you mean --out\?$' synth --model gpt-oss-20b --output x
    wrong '^error: --scheme nvpf4: .*; did you mean nvfp4\?$' explain --model gpt-oss-20b --scheme nvpf4
    wrong '^error: --experts sm91: .* did you mean sm90\?$' explain --model gpt-oss-20b --experts sm91
    wrong '^error: --seed: was 99999999999999999999; must be at most 18,446,744,073,709,551,615$' run \
      --checkpoint x --seed 99999999999999999999
    wrong '^error: --tokens: was 9999999; must be from 0 to 1,048,576$' explain --model gpt-oss-20b \
      --tokens 9999999
    wrong '^error: --tokens: was 0; must be from 1 to 1,048,576$' bench --shape 1x1x1x1 --tokens 0
    wrong '^error: --tokens: was 2.5; must be a whole number$' bench --shape 1x1x1x1 --tokens 2.5
    wrong '^error: --checkpoint needs a value: PATH$' run --checkpoint
    wrong '^error: --checkpoint is required$' run
    wrong '^error: one of --model, --config is required$' synth --out x
    wrong '^error: --json and --csv cannot be used together$' bench --shape 1x1x1x1 --json --csv
    # What would have no effect.
    wrong '^error: --csv cannot be used with --load$' bench --shape 1x1x1x1 --csv --load
    wrong '^error: --(heat-map|json) cannot be used with --' bench --shape 1x1x1x1 --json --heat-map
    wrong '^error: --(heat-map|json) cannot be used with --' run --checkpoint x --json --heat-map
    wrong '^error: --ep cannot be used with --matrix$' explain --matrix --ep 8
    wrong '^error: --tokens cannot be used with --columns$' bench --columns --tokens 3
    wrong '^error: --input cannot be used with --tokens$' run --checkpoint x --input y --tokens 3
    wrong '^error: --skew cannot be used with --replay-routing$' bench --shape 1x1x1x1 --skew zipf \
      --replay-routing x
    wrong '^error: --monolithic cannot be used with --replay-routing$' run --checkpoint x --monolithic \
      --replay-routing y
    wrong '^error: --output: was empty; needs a value: PATH$' run --checkpoint x --output ''
    wrong '^error: --experts: was empty; needs a value: EXPERTS' bench --shape 1x1x1x1 --experts ''
    wrong '^error: path: was empty; needs a value: PATH$' inspect ''
    wrong '^error: --input-name requires --input$' run --checkpoint x --input-name foo
    wrong '^error: --dispatch-dtype needs several ranks' run --checkpoint x --dispatch-dtype e4m3
    wrong '^error: --seed: was -1; must not be negative$' run --checkpoint x --seed -1
    wrong '^error: unexpected argument: more$' doctor more
    wrong '^error: unexpected argument: model; did you mean --checkpoint model\?$' run model
    wrong '^error: unexpected argument: model; did you mean --checkpoint model\?$' explain --tokens 3 \
      --json model
    wrong '^error: unknown option --checkpoint; write fusedmoe inspect PATH$' inspect --checkpoint model
    wrong '^error: PATH is required$' inspect
    wrong '^error: --tokens: was many; must be a number$' run --checkpoint x --tokens many
    wrong '^error: --scheme fp9: no such name' explain --model gpt-oss-20b --scheme fp9
    wrong '^error: --scheme fp8: .*; did you mean one of fp8_tensor, .*fp8_block_w8a16\?$' explain \
      --model gpt-oss-20b --scheme fp8
    wrong '^error: family: was "qwen3moe"; .*; did you mean qwen3_moe\?$' families qwen3moe
    refuses '^error: tune needs a GPU: experts cpu have no kernel configurations' tune \
      --model gpt-oss-20b --device cpu
    refuses '^error: cannot open nowhere' inspect nowhere
    "$program" inspect nowhere 2>err || [[ $? -eq 1 ]] || fail "not exit status 1"
    # A command names the variables that concern it.
    succeeds inspect --help
    says '^  NO_COLOR '
    ! grep -q OMP_NUM_THREADS out || fail "threads of a command that has none"
    # Every command explains itself within the width that there is; only examples are not wrapped.
    commands=$(COLUMNS=200 "$program" --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p')
    [[ $(wc -w <<<"$commands") -gt 9 ]] || fail "commands: $commands"
    for command in $commands; do
      COLUMNS=70 succeeds "$command" --help
      says "^Usage: fusedmoe $command"
      says '^Examples?:'
      says '^  -h, --help '
      says '^Exit status:'
      grep -q "^| \`$command\` |" "$configs/../../README.md" || fail "README.md does not know $command"
      ! grep -q 'TEXT\|Option Group' out || fail "CLI11's words"
      ! sed '/^Examples*:/,/^$/d' out | grep -q '.\{71\}' || fail "a line of more than 70 columns"
    done
    ;;
  usage_manual)
    succeeds --man
    says '^\.TH FUSEDMOE 1 '
    says '^Run, .* layers\.$'
    says '^\.SS "completion"'
    says '^\.B \\-\\-checkpoint PATH$'
    command -v man >/dev/null || exit 77
    cp out fusedmoe.1
    # Linux's man and groff warn of what they do not understand.
    LC_ALL=C.UTF-8 MANROFFSEQ= MANWIDTH=80 man --warnings -l ./fusedmoe.1 >page 2>warnings
    [[ ! -s warnings ]] || fail "$(cat warnings)"
    grep -q '^EXIT STATUS' page || fail "no exit statuses in the page"
    ;;
  usage_completion)
    succeeds completion bash
    # What bash offers for the last of these words.
    offers() {
      # shellcheck disable=SC1091
      bash -c 'source ./out; COMP_WORDS=(fusedmoe "$@"); COMP_CWORD=$#; _fusedmoe
        printf "%s\n" "${COMPREPLY[@]}"' bash "$@" | sort | paste -sd' '
    }
    expect() {
      [[ $2 == "$1" ]] || fail "expected '$1', but there is '$2'"
    }
    mkdir mode && touch mode/config.json
    expect 'doctor' "$(offers do)"
    expect '--checkpoint' "$(offers run --ch | sed 's/--check //')"
    expect 'balanced zipf' "$(offers bench --skew '')"
    expect 'bf16,nvfp4 bf16,nvfp4_int16 bf16,nvfp4_int8 bf16,nvfp4_w4a16' \
      "$(offers compare --schemes bf16,nvf)"
    expect 'mode' "$(offers inspect mo)"
    expect 'mode' "$(offers inspect --json mo)"
    expect '' "$(offers inspect --layer mo)"
    expect 'bash fish zsh' "$(offers completion '')"
    succeeds completion fish
    if command -v fish >/dev/null; then
      offered=$(HOME=$PWD fish --no-config -c 'source out; complete -C "fusedmoe bench --skew "')
      expect 'balanced zipf' "$(cut -f1 <<<"$offered" | sort | paste -sd' ')"
      offered=$(HOME=$PWD fish --no-config -c 'source out; complete -C "fusedmoe run --chec"')
      [[ $offered == *--checkpoint*Directory* ]] || fail "fish offers '$offered'"
    fi
    succeeds completion zsh
    says '^#compdef fusedmoe$'
    if command -v zsh >/dev/null; then
      mkdir functions && cp out functions/_fusedmoe
      shown() {
        zsh -f "$configs/complete.zsh" functions "fusedmoe $1" </dev/null | sort -u | paste -sd' '
      }
      expect 'doctor' "$(shown do)"
      expect 'balanced zipf' "$(shown 'bench --skew ')"
      expect '--check --checkpoint' "$(shown 'run --chec')"
    fi
    refuses 'zsh' completion tcsh
    ;;
  *)
    fail "no such case: $situation"
    ;;
esac
