# Arguments of the programs that sit beside this file, PROGRAM CONFIG_DIR WORK_DIR CASE EXAMPLES, and
# what their cases have in common. CASE is one situation of the real program (or of one of the
# examples in that directory) on a tiny checkpoint.
# shellcheck shell=bash disable=SC2034  # used by those who read this file
set -euo pipefail
program=$1 configs=$2 work=$3/$4 situation=$4 examples=$5
rm -rf "$work"
mkdir -p "$work"
cd "$work"

fail() {
  echo "FAILED: $1" >&2
  for file in out err; do [[ -e $file ]] && sed "s/^/  $file: /" "$file" | head -n 60 >&2; done
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

# wrong PATTERN ARGS...: refuses a wrong command line, which has a status of its own.
wrong() {
  refuses "$@"
  "$program" "${@:2}" >/dev/null 2>&1 || [[ $? -eq 2 ]] || fail "not exit status 2 of: ${*:2}"
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
