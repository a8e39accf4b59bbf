#!/usr/bin/env python3
"""Times every scheme on every level of instruction sets that this machine has, in turns.

usage: cpu_levels.py [PROGRAM] [options]; PROGRAM is build/cli/fusedmoe unless given.

A cell is one run of `fusedmoe bench` with FUSEDMOE_CPU_ISA set. For each scheme all levels run one
after the other, so that what changes on the machine meets all of them. That takes some three
seconds for each scheme and level; `chrt -f 50` before it keeps neighbours out of the samples.
Writes OUT.json (a list of the rows of bench, each with its level) and OUT.md (tables for reading,
with the misses by name: less than half of the read bandwidth at one token; slower than the level
below by more than 3 %). On a machine with other work, --resume goes on from OUT.json and times only
what it lacks, and --stop-after ends a part of the work:

    until bench/cpu_levels.py --resume --stop-after 120; do sleep 60; done
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOWEST_BANDWIDTH = 50  # per cent, at one token
SLOWER = 1.03  # than the level below


def options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", nargs="?", default=str(ROOT / "build/cli/fusedmoe"))
    parser.add_argument("--shape", default="1440x1440x24x4", help="as fusedmoe bench has it")
    parser.add_argument("--tokens", default="1,8,32,128,512")
    parser.add_argument("--levels", help="some of those of this machine, separated by commas")
    parser.add_argument("--schemes", help="some of docs/support-matrix.md, separated by commas")
    parser.add_argument("--turns", type=int, default=1, help="the best of so many counts")
    parser.add_argument("--seconds", default="0.2", help="of sampling for each cell and turn")
    parser.add_argument("--resume", action="store_true", help="keep the timed cells of OUT.json")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS",
                        help="exit with status 1 then, if there are cells left")
    parser.add_argument("--out", default=str(ROOT / "bench/results/cpu-levels"))
    return parser.parse_args()


def levels_of(program):
    """Names of the levels that this machine has, the lowest first: the program lists them when it
    is asked for one that does not exist."""
    environment = {**os.environ, "FUSEDMOE_CPU_ISA": "?"}
    result = subprocess.run([program, "doctor"], env=environment, capture_output=True, text=True)
    match = re.search(r"one that this machine has: (.*)", result.stdout + result.stderr)
    if not match:
        sys.exit(f"{program} does not name its levels: {result.stderr}")
    return list(reversed(match.group(1).strip().split(", ")))


def schemes():
    """Those that the support matrix gives to `cpu`."""
    lines = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in (ROOT / "docs/support-matrix.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    header = next(line for line in lines if line[0] == "scheme")
    column = header.index("cpu")
    return [l[0] for l in lines if len(l) == len(header) and l[column].startswith("yes")]


def bench(arguments, scheme, level):
    command = [arguments.program, "bench", "--shape", arguments.shape, "--scheme", scheme]
    command += ["--tokens", arguments.tokens, "--max-seconds", arguments.seconds]
    command += ["--min-samples", "3", "--json"]
    environment = {**os.environ, "FUSEDMOE_CPU_ISA": level}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{level} {scheme}: {result.stderr}")
    report = json.loads(result.stdout)
    for row in report["rows"]:
        row.pop("load")
    return [{"level": level, **report["context"], **row} for row in report["rows"]]


def key_of(row):
    return row["scheme"], row["level"], row["num_tokens"]


def kept(arguments):
    """{(scheme, level, tokens): row} of OUT.json"""
    path = pathlib.Path(arguments.out + ".json")
    if not arguments.resume or not path.exists():
        return {}
    return {key_of(row): row for row in json.loads(path.read_text())}


def measure(arguments, levels, names):
    """{(scheme, level, tokens): the row of the fastest turn}, and whether all cells were tried"""
    best = kept(arguments)
    tokens = [int(number) for number in arguments.tokens.split(",")]
    timed = {key for key, row in best.items() if row["samples"]}
    end = time.monotonic() + arguments.stop_after
    for turn in range(arguments.turns):
        for number, scheme in enumerate(names):
            if all((scheme, level, n) in timed for level in levels for n in tokens):
                continue
            if time.monotonic() > end:
                return best, False
            print(f"turn {turn + 1}, {number + 1} of {len(names)}: {scheme}", file=sys.stderr)
            for level in levels:
                for row in bench(arguments, scheme, level):
                    key = key_of(row)
                    if row["samples"] == 0:  # the machine was not at rest
                        best.setdefault(key, row)
                    elif key not in best or best[key]["samples"] == 0 \
                            or row["median_ms"] < best[key]["median_ms"]:
                        best[key] = row
    return best, True


def bandwidth(row):
    return 100 * row["weight_gbytes_per_s"] / row["machine_read_gbytes_per_s"]


def table(levels, names, cell):
    yield "| scheme | " + " | ".join(levels) + " |"
    yield "| --- |" + " ---: |" * len(levels)
    for scheme in names:
        yield f"| {scheme} | " + " | ".join(cell(scheme, level) for level in levels) + " |"
    yield ""


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown processor"


def page(arguments, best, levels, names):
    tokens = [int(number) for number in arguments.tokens.split(",")]
    threads = next(iter(best.values()))["threads"]
    misses = []
    yield f"# Every scheme on every level: {processor()}"
    yield ""
    yield (f"`bench/cpu_levels.py --shape {arguments.shape} --tokens {arguments.tokens} --turns "
           f"{arguments.turns}`: {threads} threads, the best of the turns.")
    yield ""
    for number in tokens:
        def timed(scheme, level):
            row = best[scheme, level, number]
            return row if row["samples"] else None

        def text(scheme, level):
            row = timed(scheme, level)
            if not row:
                misses.append(f"{scheme}, {level}, {number} tokens: not timed, the machine was busy")
                return "-"
            parts = [f"{row['median_ms']:.4g}"]
            if number == 1:
                share = bandwidth(row)
                parts.append(f"{share:.0f} %")
                if share < LOWEST_BANDWIDTH:
                    misses.append(f"{scheme}, {level}, 1 token: {share:.0f} % of the bandwidth")
            place = levels.index(level)
            below = timed(scheme, levels[place - 1]) if place else None
            if below:
                ratio = row["median_ms"] / below["median_ms"]
                parts.append(f"{ratio:.2f}")
                if ratio > SLOWER:
                    misses.append(f"{scheme}, {level}, {number} tokens: {ratio:.2f} times "
                                  f"the time of {levels[place - 1]}")
            return " / ".join(parts)

        share = "share of the read bandwidth / " if number == 1 else ""
        yield f"## {number} token{'s' if number > 1 else ''}"
        yield ""
        yield f"ms / {share}time over that of the level to the left"
        yield ""
        yield from table(levels, names, text)
    yield "## Misses"
    yield ""
    yield (f"Less than {LOWEST_BANDWIDTH} % of the read bandwidth at one token, or more than "
           f"{round(100 * (SLOWER - 1))} % slower than the level below.")
    yield ""
    yield from ([f"* {miss}" for miss in misses] or ["None."])


def main():
    arguments = options()
    all_levels = levels_of(arguments.program)
    wanted = arguments.levels.split(",") if arguments.levels else all_levels
    levels = [level for level in all_levels if level in wanted]
    names = arguments.schemes.split(",") if arguments.schemes else schemes()
    best, complete = measure(arguments, levels, names)
    pathlib.Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(arguments.out + ".json").write_text(
        json.dumps(list(best.values()), indent=1) + "\n")
    if not complete:
        sys.exit(1)
    pathlib.Path(arguments.out + ".md").write_text(
        "\n".join(page(arguments, best, levels, names)) + "\n")
    print(arguments.out + ".md")


if __name__ == "__main__":
    main()
