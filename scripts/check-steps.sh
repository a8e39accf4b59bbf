# shellcheck shell=bash
# Sourced by gpu-check.sh and ep-check.sh: their options, and steps that together take no longer than
# $seconds.

# The comment at the top of the script.
usage() {
  sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p}' "scripts/${0##*/}"
  exit "$1"
}

# parse_options NAMES STEPS ARGUMENTS...: sets the variable of each option --NAME VALUE. Of --steps
# the parts must be among STEPS.
parse_options() {
  local names=$1 known=$2 name part
  shift 2
  while (($#)); do
    [[ $1 != --help ]] || usage 0
    name=${1#--}
    [[ $1 == --* && " $names " == *" $name "* ]] && (($# >= 2)) || usage 2
    printf -v "$name" '%s' "$2"
    shift 2
  done
  for part in ${steps//,/ }; do
    [[ " $known " == *" $part "* ]] || usage 2
  done
}
wants() { [[ ,$steps, == *,$1,* ]]; }

failures=()
# step NAME COMMAND...: runs it, and remembers its name if it fails.
step() {
  local name=$1 start=$SECONDS status=0
  shift
  "$@" || status=$?
  ((status == 0)) || failures+=("$name")
  printf '=== %-44s %4d s  %s\n' "$name" $((SECONDS - start)) \
    "$(case $status in 0) echo ok ;; 124) echo "TIMED OUT" ;; *) echo FAILED ;; esac)"
  return $status
}
# within LIMIT COMMAND...: a program, for so many seconds, and not longer than all of it may take.
within() {
  local limit=$1 left=$((seconds - SECONDS))
  shift
  ((left > 0)) || return 124
  timeout --kill-after=5 $((limit < left ? limit : left)) "$@"
}
# The output of a command, if it fails.
quietly() {
  local status=0
  "$@" >"$log" 2>&1 || status=$?
  ((status == 0)) || tail -n 60 "$log"
  return $status
}
log=$(mktemp)
trap 'rm -f "$log"*' EXIT

# configure ARGUMENTS...: a build with CUDA. --cmake gives more arguments.
configure() {
  local more
  read -ra more <<<"${cmake:-}"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DFUSEDMOE_CUDA=ON -Wno-dev \
    --log-level=WARNING "${more[@]}" "$@"
}
build_targets() {
  within "$build_seconds" cmake --build "$build" -j "$(nproc)" --target "$@"
}
# build_programs TARGETS...: of these alone.
build_programs() {
  configure && build_targets "$@"
}

# Ends the script: exit status 1 where a step has failed.
finish() {
  ((${#failures[@]})) || exit 0
  printf 'failed: %s\n' "${failures[@]}" >&2
  exit 1
}
