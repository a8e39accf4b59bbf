#!/usr/bin/env python3
"""Tokens per second of transformers' generate() on this CPU, by whose experts: fusedmoe's, and each
implementation of transformers that runs here. A gpt-oss model with random weights, experts in
MXFP4, layers of the published size. Prints a Markdown table, the CPU and its load.

    PYTHONPATH=build/python python3 bench/generate_table.py [--layers 2] [--repeat 3]

Needs torch and transformers. Each run is a process of its own; a cell has the median of the runs,
and their range."""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys

PUBLISHED = {"hidden": 2880, "intermediate": 2880, "experts": 32, "topk": 4, "vocabulary": 201088}


def cpu():
    text = subprocess.run(["lscpu"], stdout=subprocess.PIPE, text=True, check=True).stdout
    fields = dict(re.findall(r"^([^:]+):\s*(.*)$", text, re.MULTILINE))
    return ", ".join(f"{key} {fields[key]}" for key in ("Model name", "CPU(s)", "L3 cache")
                     if key in fields)  # fmt: skip


def load():
    return "load " + " ".join(f"{value:.1f}" for value in os.getloadavg())


def measure(arguments):
    sizes = {**PUBLISHED, "layers": arguments.layers, "new-tokens": arguments.new_tokens}
    command = [sys.executable, "-m", "fusedmoe.demo", "--json"]
    for name, size in sizes.items():
        command += [f"--{name}", str(size)]
    command += ["--implementations", *arguments.implementations]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return json.loads(output)["results"]


def cell(values, digits):
    values = [value for value in values if value is not None]
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main():
    import torch
    import transformers

    from fusedmoe import demo

    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--implementations", nargs="+", default=demo.IMPLEMENTATIONS)
    arguments = parser.parse_args()
    before = load()
    runs = [measure(arguments) for _ in range(arguments.repeat)]
    print(f"{cpu()}; {before} before, {load()} after; Python {platform.python_version()}, "
          f"torch {torch.__version__}, transformers {transformers.__version__}; "
          f"{arguments.layers} layers\n")  # fmt: skip
    print("| experts by | tokens/s, prompt of 16 | tokens/s, decode | peak memory, GB | error |")
    print("| --- | --- | --- | --- | --- |")
    for rows in zip(*runs):
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        error = columns["error"][0]
        print(f"| {rows[0]['implementation']} | {cell(columns['prompt_tokens_per_s'], 1)} "
              f"| {cell(columns['decode_tokens_per_s'], 1)} "
              f"| {max(columns['peak_bytes']) / 1e9:.1f} "
              f"| {'-' if error is None else f'{100 * error:.2f} %'} |")  # fmt: skip


if __name__ == "__main__":
    main()
