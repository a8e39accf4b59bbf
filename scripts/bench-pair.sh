#!/usr/bin/env bash
# Two builds of the program on one machine, run in turns: how much faster or slower each cell of the
# benchmark became. Prints a table of new time / old time; a cell's time is its best over the rounds:
# on a GPU the median of a round, on a CPU, where others disturb more, its shortest sample.
#
#   scripts/bench-pair.sh OLD_PROGRAM NEW_PROGRAM [ROUNDS [TOKENS [DEVICE]]]
set -euo pipefail
cd "$(dirname "$0")/.."
old=$1 new=$2 rounds=${3:-2} tokens=${4:-1,8,32,128,512,2048,8192} device=${5:-cuda}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
priority=()
if [ "$device" = cuda ]; then
  column=median_ms
  cells=(
    "mxfp4_w4a16 --model gpt-oss-20b" "mxfp4_w4a16 --model gpt-oss-120b" "bf16 --model gpt-oss-20b"
    "bf16 --model qwen3-30b-a3b" "bf16 --model mixtral-8x7b"
  )
else
  column=min_ms
  # Real-time priority, where it is allowed, keeps neighbours out of the samples.
  if chrt -f 50 true 2>/dev/null; then priority=(chrt -f 50); fi
  cells=()
  for scheme in bf16 fp8_block fp8_channel_token int8_w8a8 int8_g32 int4_g128 mxfp4_w4a16 nvfp4 \
    w4a8 q4_k q6_k; do
    cells+=("$scheme --shape 2880x2880x12x4")
  done
fi
for cell in "${cells[@]}"; do
  read -r scheme what model <<<"$cell"
  for ((round = 0; round < rounds; ++round)); do
    for side in old new; do
      "${priority[@]}" "${!side}" bench --device "$device" "$what" "$model" --scheme "$scheme" --tokens "$tokens" \
        --max-seconds "${SECONDS_PER_CELL:-10}" --csv >"$folder/$side.$scheme.$model.$round.csv"
    done
  done
done
python3 - "$folder" "$column" <<'PY'
import csv, glob, os, statistics, sys
times = {}
for path in glob.glob(os.path.join(sys.argv[1], "*.csv")):
    side, scheme, model = os.path.basename(path).split(".")[:3]
    for row in csv.DictReader(open(path)):
        if row[sys.argv[2]] != "-":  # every sample was disturbed
            key = scheme, model, int(row["tokens"])
            times.setdefault(key, {}).setdefault(side, []).append(float(row[sys.argv[2]]))
print("scheme model tokens old_us new_us new/old")
ratios = []
for key in sorted(key for key in times if len(times[key]) == 2):
    old, new = min(times[key]["old"]), min(times[key]["new"])
    ratios.append(new / old)
    print(*key, f"{1e3 * old:.2f} {1e3 * new:.2f} {new / old:.3f}")
print(f"worst {max(ratios):.3f}, geometric mean {statistics.geometric_mean(ratios):.3f}")
PY
