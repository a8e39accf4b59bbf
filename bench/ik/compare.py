#!/usr/bin/env python3
"""Times the MoE layer of ik_llama.cpp beside ours, in turns.

usage: compare.py [IK_ROOT] [options]; IK_ROOT is the folder of an ik_llama.cpp that you have built, as

    cmake -S IK_ROOT -B IK_ROOT/build -DGGML_NATIVE=ON && cmake --build IK_ROOT/build --target ggml

builds it for this processor; without it pkg-config must know one (module llama). Only the program
ik_moe, which links it, is built here. --built-for says what its instructions are, where they are not
this processor's, as FUSEDMOE_CPU_ISA does for ours. In each round every format
runs as ik_llama.cpp has it (plain, and with rows interleaved as by its option -rtr) and then as
`fusedmoe bench` has it. The same shape, SiLU without biases, cold weights, another routing for each
run. Prints a Markdown table: the median over the rounds of the medians, in ms.
ik_llama.cpp quantizes activations to int8 for 4-bit weights; so do our schemes whose names end in
_int8. Those in _int16 keep them nearly exact, all others exact.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FORMATS = {  # of ik_llama.cpp: our schemes
    "mxfp4": ["mxfp4_w4a16", "mxfp4_int16", "mxfp4_int8"],
    "q4_0": ["int4_g32", "int4_g32_int16", "int4_g32_int8"],
    "bf16": ["bf16"],
}


def options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", default="")
    parser.add_argument("--program", default=str(ROOT / "build/cli/fusedmoe"))
    parser.add_argument("--build", default=str(ROOT / "build-ik"))
    parser.add_argument("--built-for", default="this processor", help="a word for the table")
    parser.add_argument("--shape", default="2880x2880x32x4", help="default: gpt-oss-20b")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", default="1,8,32,128,512")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", default="1", help="for each number of tokens and round")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--out", help="a file for the table")
    return parser.parse_args()


def build(arguments):
    root = str(pathlib.Path(arguments.root).resolve()) if arguments.root else ""
    subprocess.run(["cmake", "-S", ROOT / "bench/ik", "-B", arguments.build, "-G", "Ninja",
                    "-DIK_ROOT=" + root, "--log-level=WARNING", "-Wno-dev"], check=True)
    subprocess.run(["cmake", "--build", arguments.build], check=True)


def ik(arguments, kind, layout):
    """{tokens: ms}; empty if there is no such layout for these instructions"""
    result = subprocess.run(
        [arguments.build + "/ik_moe", kind, layout, arguments.shape, arguments.tokens,
         arguments.seconds, arguments.threads], capture_output=True, text=True)
    if layout == "repacked" and "does not repack this type" in result.stderr:
        return {}
    result.check_returncode()
    lines = [line.split() for line in result.stdout.splitlines()]
    return {int(tokens): float(ms) for tokens, ms, _ in lines}


def ours(arguments, scheme):
    """{tokens: ms}, and the instruction set"""
    result = subprocess.run(
        [arguments.program, "bench", "--shape", arguments.shape, "--scheme", scheme, "--tokens",
         arguments.tokens, "--max-seconds", arguments.seconds, "--min-samples", "5", "--threads",
         arguments.threads, "--json"], check=True, capture_output=True, text=True)
    report = json.loads(result.stdout)
    times = {row["num_tokens"]: row["median_ms"] for row in report["rows"] if row["samples"]}
    return times, report["context"]["isa"]


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown processor"


def main():
    arguments = options()
    build(arguments)
    formats = arguments.formats.split(",")
    tokens = [int(number) for number in arguments.tokens.split(",")]
    times = {}  # (format, who): {tokens: [ms]}
    isa = ""
    for _ in range(arguments.rounds):
        for kind in formats:
            runs = {f"ik {layout}": ik(arguments, kind, layout)
                    for layout in ("plain", "repacked")}
            for scheme in FORMATS[kind]:
                runs[scheme], isa = ours(arguments, scheme)
            for who, row in runs.items():
                cells = times.setdefault((kind, who), {})
                for number, ms in row.items():
                    cells.setdefault(number, []).append(ms)

    best = {}  # (format, tokens): ms of the faster of ik's two
    lines = [f"{arguments.shape}, {arguments.threads} threads, {processor()}, our level {isa}, "
             f"ik_llama.cpp for {arguments.built_for}, {datetime.date.today()}. ms; in brackets: times "
             "as fast as ik's faster one.", "",
             "| format | who | " + " | ".join(f"{n}" for n in tokens) + " |",
             "| --- | --- |" + " ---: |" * len(tokens)]
    for (kind, who), row in times.items():
        cells = []
        for number in tokens:
            if number not in row:
                cells.append("-")  # no such layout, or the machine was busy between the probes
                continue
            ms = statistics.median(row[number])
            text = f"{ms:.3g}"
            if who.startswith("ik"):
                best[kind, number] = min(ms, best.get((kind, number), ms))
            else:
                text += f" ({best[kind, number] / ms:.2f})"
            cells.append(text)
        lines.append(f"| {kind} | {who} | " + " | ".join(cells) + " |")
    table = "\n".join(lines) + "\n"
    print(table, end="")
    if arguments.out:
        pathlib.Path(arguments.out).write_text(table)


if __name__ == "__main__":
    main()
