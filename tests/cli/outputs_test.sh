#!/usr/bin/env bash
# Where outputs come from and what they leave behind: see common.sh. Exit status 77: skipped.
# shellcheck source=tests/cli/common.sh
source "$(dirname "$0")/common.sh"

# Long enough to be met while it is written; killed at its beginning.
long=(synth --model gpt-oss-20b --layers 2 --out model)

skip() {
  echo "SKIPPED: $1"
  exit 77
}

# hidden [FOLDER]: what is being written there, or was left.
hidden() {
  find "${1:-.}" -mindepth 1 -maxdepth 1 -name '.model.*.tmp'
}

# until COMMAND...: waits until it succeeds, at most half a minute.
until_true() {
  local end=$((SECONDS + 30))
  until "$@"; do
    [[ $SECONDS -lt $end ]] || fail "never true: $*"
    sleep 0.01
  done
}
there_is_a_hidden_one() { [[ -n $(hidden) ]]; }
lock_is_free() { flock -n "$(hidden)" true; }

# A run in the background that has begun to write. It ignores no signal, as jobs of scripts and what
# nohup starts do.
start_long_run() {
  env --default-signal=INT,TERM,HUP "$@" "$program" "${long[@]}" >long.out 2>long.err &
  pid=$!
  until_true there_is_a_hidden_one
}

# ends_with STATUS: the exit status of the run in the background.
ends_with() {
  local status=0
  wait "$pid" 2>/dev/null || status=$?
  [[ $status -eq $1 ]] || fail "exit status $status of the long run, not $1: $(cat long.err)"
}

leaves_nothing() {
  [[ -z $(hidden) ]] || fail "left behind: $(hidden)"
}

warns() {
  grep -Eq -- "$1" err || fail "no '$1' on stderr"
}

case $situation in
  outputs_signals)
    for signal in INT TERM HUP; do
      start_long_run
      kill -s "$signal" "$pid"
      ends_with $((128 + $(kill -l "$signal")))
      leaves_nothing
      [[ ! -e model ]] || fail "an unfinished folder has its name"
    done
    ;;
  outputs_leftovers)
    start_long_run
    kill -KILL "$pid"
    ends_with 137
    left=$(hidden)
    synth qwen3_tiny
    warns "^info: removed (\./)?${left#./}, which a run that was killed has left$"
    leaves_nothing
    # Of another host, or of before this one was started: nobody knows.
    rm -r model
    mkdir .model.000000000000-0123456789abcdef.tmp
    synth qwen3_tiny
    warns '^warning: (\./)?\.model\.0{12}-0123456789abcdef\.tmp was left .*; --force removes it$'
    [[ -n $(hidden) ]] || fail "removed what may be another host's"
    rm -r model
    synth qwen3_tiny --force
    warns '^info: removed '
    leaves_nothing
    # Of a run that goes on: never.
    rm -r model
    host=$(tr -d - </proc/sys/kernel/random/boot_id | cut -c 1-12)
    mkdir ".model.$host-0123456789abcdef.tmp"
    flock ".model.$host-0123456789abcdef.tmp" \
      "$program" synth --config "$configs/qwen3_tiny.json" --out model --force >out 2>err ||
      fail "exit status $?"
    warns "^warning: another run is writing .*$host-0123456789abcdef\.tmp$"
    [[ -n $(hidden) ]] || fail "removed what a run is writing"
    # A name that only looks like one is no leftover, and a file is one as a folder is.
    touch .out.safetensors.notes.tmp ".out.safetensors.$host-0123456789abcdef.tmp"
    succeeds "${run_args[@]}"
    warns '^info: removed .*out\.safetensors\..*tmp, which'
    [[ $(find . -name '.out.*') == ./.out.safetensors.notes.tmp ]] || fail "another was removed"
    ;;
  outputs_containers)
    inside=(unshare -r -p -f --kill-child)
    "${inside[@]}" true 2>err || skip "no process namespaces here: $(cat err)"
    # Both runs have number 1 in theirs. The first stands still while the second runs.
    sed 's/"hidden_size": 64/"hidden_size": 512/; s/"moe_intermediate_size": 40/"moe_intermediate_size": 640/' \
      "$configs/qwen3_tiny.json" >large.json
    long=(synth --config large.json --out model)
    start_long_run "${inside[@]}"
    first=$(<"/proc/$pid/task/$pid/children")
    kill -STOP "${first% }"
    there_is_a_hidden_one || fail "the first run was too short"
    "${inside[@]}" "$program" synth --config "$configs/qwen3_tiny.json" --out model >out 2>err ||
      fail "exit status $?"
    warns '^warning: another run is writing '
    kill -CONT "$pid" "${first% }"
    ends_with 1
    grep -q '^error: cannot write model: another run has made it meanwhile$' long.err ||
      fail "$(cat long.err)"
    leaves_nothing
    succeeds inspect model
    says '^family +qwen3_moe$'
    # The first process of a container is ended by signals, too.
    rm -r model
    start_long_run "${inside[@]}"
    kill -KILL "$pid"
    wait "$pid" || true
    until_true lock_is_free  # the program ends after unshare
    synth qwen3_tiny
    warns '^info: removed '
    leaves_nothing
    ;;
  outputs_existing)
    mkdir empty model
    synth qwen3_tiny
    leaves_nothing
    [[ -z $(hidden model) ]] || fail "left in the folder"
    refuses 'cannot write to model: it exists and is no empty directory' "${long[@]}"
    ln -s empty link
    ln -s fresh dangling
    for name in link dangling/; do
      succeeds synth --config "$configs/qwen3_tiny.json" --out "$name"
      succeeds inspect "$name"
    done
    [[ -L link && -e empty/config.json && -L dangling && -e fresh/config.json ]] || fail "links"
    # Two runs do not mix in one folder.
    rm -r model
    mkdir model
    host=$(tr -d - </proc/sys/kernel/random/boot_id | cut -c 1-12)
    mkdir "model/.model.$host-0123456789abcdef.tmp"
    if flock "model/.model.$host-0123456789abcdef.tmp" \
      "$program" synth --config "$configs/qwen3_tiny.json" --out model >out 2>err; then
      fail "two runs in one folder"
    fi
    warns '^error: cannot write to model: another run is writing there$'
    rmdir "model/.model.$host-0123456789abcdef.tmp" model || fail "something was left"
    # A file takes the place of what a link leads to.
    ln -s y.safetensors out.safetensors
    synth qwen3_tiny
    succeeds "${run_args[@]}"
    [[ -L out.safetensors && -f y.safetensors ]] || fail "the link was replaced"
    ;;
  outputs_replacing)
    synth qwen3_tiny
    succeeds run --checkpoint model --tokens 4 --record-routing ids.safetensors
    mkdir before
    cp -r model ids.safetensors before
    wrong '^error: --save-plan model/config.json is a file of the checkpoint: name another$' \
      explain --checkpoint model --save-plan model/config.json
    wrong '^error: --output ./ids.safetensors is the file of --routing: name another$' \
      balance --routing ids.safetensors --ep 2 --output ./ids.safetensors
    mkdir after
    cp -r model ids.safetensors after
    diff -r before after || fail "replaced"
    # Two outputs are two files, whatever they are called.
    for other in ./x "$PWD/x" model/../x; do
      wrong '^error: --record-routing .*x is the file of --output: name another$' \
        run --checkpoint model --output x --record-routing "$other"
    done
    ;;
  outputs_refused)
    synth qwen3_tiny
    ln -s loop loop
    long_name=$(printf 'n%.0s' {1..300})
    for name in loop "$long_name"; do
      pattern="^error: cannot write $name: (too many levels of symbolic links|file name too long)$"
      refuses "$pattern" run --checkpoint model --output "$name"
      refuses "$pattern" explain --checkpoint model --save-plan "$name"
      refuses "$pattern" synth --config "$configs/qwen3_tiny.json" --out "$name"
      refuses "$pattern" quantize --checkpoint model --scheme int8_channel --output "$name"
      refuses "^error: cannot (open|read) $name: [a-z]" inspect "$name"
    done
    refuses '^error: model/config.json is no checkpoint: name the directory that it is in$' \
      inspect model/config.json
    # Nobody may ever write to it.
    mkfifo pipe
    status=0
    timeout 60 "$program" inspect pipe 2>err || status=$?
    [[ $status -eq 1 ]] || fail "exit status $status of a pipe"
    warns '^error: cannot read pipe: not a regular file$'
    # A limit of the size of files, in blocks of 1024 bytes.
    rm -r model
    (ulimit -f 20 && refuses '^error: cannot write model/.*: file too large$' \
      synth --config "$configs/qwen3_tiny.json" --out model)
    leaves_nothing
    ;;
  outputs_mounts)
    inside=(unshare -r -m)
    "${inside[@]}" true 2>err || skip "no mount namespaces here: $(cat err)"
    "${inside[@]}" bash -euo pipefail -c '
      program=$1 config=$2
      mkdir small full parent
      mount -t tmpfs -o size=64k tmpfs small || exit 77
      mount -t tmpfs -o size=4k tmpfs full
      mount -t tmpfs -o size=64k tmpfs parent
      mkdir parent/model
      mount -t tmpfs -o size=64m tmpfs parent/model
      # An empty file system is not quite empty.
      mkdir parent/model/lost+found
      "$program" synth --config "$config" --out parent/model
      "$program" inspect parent/model >inspected
      for out in small small/model; do
        if "$program" synth --config "$config" --out "$out" 2>err; then exit 1; fi
        grep -q "^error: cannot write $out: [0-9]* bytes are needed, [0-9]* are free$" err
        [[ -z $(ls -A small) ]]
      done
      # Nor has a disk that is full room for a file.
      status=0
      "$program" run --checkpoint parent/model --input parent/model/input.safetensors \
        --output full/out.safetensors 2>err || status=$?
      [[ $status -eq 1 && -z $(ls -A full) ]]
      grep -q "^error: cannot write full/out.safetensors: no space left on device$" err
      ' bash "$program" "$configs/qwen3_tiny.json" >out 2>mounts.err || {
      status=$?
      [[ $status -ne 77 ]] || skip "no file systems in memory here: $(cat mounts.err)"
      cat mounts.err >&2
      fail "exit status $status"
    }
    grep -q '^family *qwen3_moe$' inspected || fail "another model"
    ;;
  outputs_full_stdout)
    [[ -c /dev/full ]] || skip "no /dev/full here"
    synth qwen3_tiny
    for command in "inspect model" "families" "--help" "doctor --json"; do
      status=0
      # shellcheck disable=SC2086  # several words
      "$program" $command >/dev/full 2>err || status=$?
      [[ $status -eq 1 ]] || fail "exit status $status of $command with a full stdout"
      warns '^error: cannot write (all of the results to stdout|to file: No space left on device)$'
    done
    ;;
  *)
    fail "no such case: $situation"
    ;;
esac
