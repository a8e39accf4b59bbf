#!/usr/bin/env bash
# The CPU figures of docs/performance-cpu.md: whole layers of two models, in two formats, as JSON and as a
# table; and a layer of gpt-oss's width with fewer experts in every scheme, as Markdown. Real-time
# priority, where it is allowed, keeps neighbours out of the samples.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset default --log-level=WARNING
cmake --build --preset default --target fusedmoe_cli
name=cpu-$(git rev-parse --short HEAD)
priority=()
if chrt -f 50 true 2>/dev/null; then priority=(chrt -f 50); fi
mkdir -p bench/results
"${priority[@]}" build/cli/fusedmoe bench --model gpt-oss-20b,qwen3-30b-a3b \
  --scheme mxfp4_w4a16,bf16 --tokens 1,8,32,128,512 --max-seconds "${SECONDS_PER_CELL:-6}" \
  --json >"bench/results/$name.json.part"
mv "bench/results/$name.json.part" "bench/results/$name.json"
echo "bench/results/$name.json"

schemes=cpu-schemes-$(git rev-parse --short HEAD)
"${priority[@]}" build/cli/fusedmoe bench --shape 2880x2880x12x4 --scheme "${SCHEMES:-all}" \
  --max-seconds 1.5 --md >"bench/results/$schemes.md.part"
mv "bench/results/$schemes.md.part" "bench/results/$schemes.md"
echo "bench/results/$schemes.md"
