#!/usr/bin/env bash
# The main job on real sizes: one gpt-oss-20b layer in its published layout (2880 x 2880, 32
# experts, top-4, MXFP4, about 420 MB), 64 tokens through it, four rows checked against the
# reference implementation.
set -euo pipefail
cd "$(dirname "$0")/.."
program=build-demo/cli/fusedmoe
layer=build-demo/demo/gpt-oss-20b
if [[ ! -d $layer ]]; then
  mkdir -p build-demo/demo
  "$program" synth --model gpt-oss-20b --layers 1 --tokens 64 --out "$layer"
fi
"$program" inspect "$layer"
"$program" run --checkpoint "$layer" --input "$layer/input.safetensors" \
  --output build-demo/demo/output.safetensors --repeat 5 --check 4 --load-chart
