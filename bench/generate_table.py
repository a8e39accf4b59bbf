#!/usr/bin/env python3
"""Tokens per second of transformers' generate() on this CPU or a GPU, by whose experts: fusedmoe's,
and each implementation of transformers. A gpt-oss model with random weights, experts in MXFP4,
layers of the published size. Prints a Markdown table, the processor and its load, and why what
transformers has beyond the table did not run.

    PYTHONPATH=build/python python3 bench/generate_table.py [--layers 2] [--repeat 3]
    PYTHONPATH=build/python python3 bench/generate_table.py --device cuda:0 --layers 8 --prompts 16 1024

Needs torch and transformers. Each run is a process of its own; a cell has the median of the runs,
and their range. The memory is that of the process, on a GPU that of the GPU."""

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


def processor(device):
    import torch

    return cpu() if device == "cpu" else f"{torch.cuda.get_device_name(device)}, {cpu()}"


def known_implementations():
    """Those of the demo, and what else this transformers has; f32, the measure of errors, first."""
    from transformers.integrations import moe

    from fusedmoe import demo

    return list(dict.fromkeys([*demo.IMPLEMENTATIONS, *moe.ALL_EXPERTS_FUNCTIONS.keys()]))


def measure(arguments):
    sizes = {**PUBLISHED, "layers": arguments.layers, "new-tokens": arguments.new_tokens}
    command = [sys.executable, "-m", "fusedmoe.demo", "--json", "--device", arguments.device]
    command += ["--prompts", *map(str, arguments.prompts)]
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


def row(results, prompts):
    """The line of one implementation, from its results in all runs."""
    columns = {key: [result[key] for result in results] for key in results[0]}
    error = columns["error"][0]
    rates = [cell([rates[i] for rates in columns["prompt_tokens_per_s"]], 1)
             for i in range(len(prompts))]  # fmt: skip
    return [results[0]["implementation"], *rates, cell(columns["decode_tokens_per_s"], 1),
            cell(columns["experts_ms"], 3),
            f"{max(columns['peak_bytes']) / 1e9:.1f}",
            "-" if error is None else f"{100 * error:.2f} %"]  # fmt: skip


def main():
    import torch
    import transformers

    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, nargs="+", default=[16], help="lengths")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--implementations", nargs="+", default=known_implementations())
    arguments = parser.parse_args()
    before = load()
    runs = [measure(arguments) for _ in range(arguments.repeat)]
    print(f"{processor(arguments.device)}; {before} before, {load()} after; "
          f"Python {platform.python_version()}, torch {torch.__version__}, "
          f"transformers {transformers.__version__}; {arguments.layers} layers\n")  # fmt: skip
    rates = [f"tokens/s, prompt of {length}" for length in arguments.prompts]
    heading = ["experts by", *rates, "tokens/s, decode", "experts module in it, ms", "peak memory, GB", "error"]
    for cells in (heading, ["---"] * len(heading)):
        print(f"| {' | '.join(cells)} |")
    failed = []
    for results in zip(*runs):
        ran = [result for result in results if "failure" not in result]
        if ran:
            print(f"| {' | '.join(row(ran, arguments.prompts))} |")
        failed += [result for result in results if "failure" in result][:1]
    for result in failed:
        print(f"\n{result['implementation']} did not run: {result['failure']}")


if __name__ == "__main__":
    main()
