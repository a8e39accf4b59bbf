#!/usr/bin/env python3
"""Measures every kernel configuration of some layers with `fusedmoe tune` and prints how much slower
the chosen one is than the fastest: for each layer the mean and the worst of its numbers of tokens, and
those above a limit. The fastest of many medians is a little too fast, so the loss is a little too
large."""

import argparse
import os
import re
import subprocess
import sys
import tempfile

TOKENS = "1,2,4,8,16,32,64,128,256,512,1024,4096"
# Published models, shards of tensor and expert parallelism, shared experts: scheme, layer.
LAYERS = [
    ("mxfp4_w4a16", "model gpt-oss-20b"),
    ("mxfp4_w4a16", "model gpt-oss-120b"),
    ("mxfp4_w4a16", "shape 2880x720x32x4"),
    ("mxfp4_w4a16", "shape 4096x1536x128x8"),
    ("mxfp4_w4a16", "shape 2048x192x128x8"),
    ("mxfp4_w4a16", "shape 2048x256x128x8"),
    ("mxfp4_w4a16", "shape 2048x384x128x8"),
    ("mxfp4_w4a16", "shape 2880x2880x1x1"),
    ("mxfp4_w4a16", "shape 7168x2048x1x1"),
    ("bf16", "model gpt-oss-20b"),
    ("bf16", "model mixtral-8x7b"),
    ("bf16", "model qwen3-30b-a3b"),
    ("bf16", "model llama4-scout"),
    ("bf16", "shape 7168x2048x32x8"),
    ("bf16", "shape 4096x1536x16x8"),
    ("bf16", "shape 2048x192x128x8"),
    ("bf16", "shape 2048x256x128x8"),
    ("bf16", "shape 2048x384x128x8"),
    ("bf16", "shape 2880x2880x2x1"),
    ("bf16", "shape 5120x8192x1x1"),
    ("bf16", "shape 7168x2048x1x1"),
    ("fp8_block", "model mixtral-8x7b"),
    ("fp8_block", "model qwen3-30b-a3b"),
    ("fp8_block", "shape 7168x2048x32x8"),
    ("fp8_channel_token", "model qwen3-30b-a3b"),
    ("w4a8", "model mixtral-8x7b"),
    ("w4a8", "model qwen3-30b-a3b"),
    ("int4_g128", "model qwen3-30b-a3b"),
    ("nvfp4_w4a16", "model qwen3-30b-a3b"),
]


def measure(program, scheme, option, name, tokens):
    """{num_tokens: [(us, configuration, whether chosen)]}"""
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "tune", "--scheme", scheme, "--tokens", tokens]
        command += ["--output", os.path.join(folder, "tuned.json"), f"--{option}", name]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{' '.join(command)}\n{run.stderr}")
    cells = {}
    for line in run.stdout.splitlines():
        if found := re.search(r", (\d+) tokens, floor", line):
            rows = cells.setdefault(int(found[1]), [])
        elif found := re.match(r"(one token|\S+ splits \d \S+) +([\d.]+) ", line):
            rows.append((float(found[2]), found[1], "heuristic" in line))
    return cells


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default="build-cuda/cli/fusedmoe")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--schemes", default="", help="of the layers; default: all")
    parser.add_argument("--limit", type=float, default=5, help="percent")
    arguments = parser.parse_args()
    slow = []
    print("| layer | scheme | mean | worst |\n| --- | --- | --- | --- |")
    schemes = set(filter(None, arguments.schemes.split(",")))
    for scheme, layer in LAYERS:
        if schemes and scheme not in schemes:
            continue
        option, name = layer.split()
        losses = []
        cells = measure(arguments.program, scheme, option, name, arguments.tokens)
        for num_tokens, rows in cells.items():
            best, chosen = min(rows), next(row for row in rows if row[2])
            losses.append(100 * (chosen[0] / best[0] - 1))
            if losses[-1] > arguments.limit:
                slow.append(
                    f"{name} {scheme}, {num_tokens} tokens: {chosen[1]} {chosen[0]} us, "
                    f"{losses[-1]:.1f} % slower than {best[1]}"
                )
        mean = sum(losses) / len(losses)
        print(f"| {name} | {scheme} | {mean:.1f} % | {max(losses):.1f} % |", flush=True)
    print("\n" + "\n".join(slow))


if __name__ == "__main__":
    main()
