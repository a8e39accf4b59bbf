#!/usr/bin/env bash
# Two builds of the program on one GPU, run in turns: how much faster or slower each cell of the
# benchmark became. Prints a table of new time / old time.
#
#   scripts/gpu-pair.sh OLD_PROGRAM NEW_PROGRAM [ROUNDS [TOKENS]]
set -euo pipefail
cd "$(dirname "$0")/.."
old=$1 new=$2 rounds=${3:-2} tokens=${4:-1,8,32,128,512,2048,8192}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pairs=(
  "mxfp4_w4a16 gpt-oss-20b" "mxfp4_w4a16 gpt-oss-120b" "bf16 gpt-oss-20b" "bf16 qwen3-30b-a3b"
  "bf16 mixtral-8x7b"
)
for pair in "${pairs[@]}"; do
  read -r scheme model <<<"$pair"
  for ((round = 0; round < rounds; ++round)); do
    for side in old new; do
      "${!side}" bench --device cuda --model "$model" --scheme "$scheme" --tokens "$tokens" --csv \
        >"$folder/$side.$scheme.$model.$round.csv"
    done
  done
done
python3 - "$folder" <<'PY'
import csv, glob, os, sys
times = {}
for path in glob.glob(os.path.join(sys.argv[1], "*.csv")):
    side, scheme, model = os.path.basename(path).split(".")[:3]
    for row in csv.DictReader(open(path)):
        key = scheme, model, int(row["tokens"])
        times.setdefault(key, {}).setdefault(side, []).append(float(row["median_ms"]))
print("scheme model tokens old_us new_us new/old")
worst = 0
for key in sorted(times):
    old, new = min(times[key]["old"]), min(times[key]["new"])
    worst = max(worst, new / old)
    print(*key, f"{1e3 * old:.2f} {1e3 * new:.2f} {new / old:.3f}")
print(f"worst {worst:.3f}")
PY
