#!/usr/bin/env python3
"""Prints CSVs of `fusedmoe bench --csv` as Markdown: a table for each file, with a cell
`time / floor = ratio` in us for each model and number of tokens and, where peers were measured on
the same routing, the best one's time. A cell that is more than 2 % slower than that has a "!".

With --ratios two tables for all files instead, whose cells have `time / floor` and `best peer /
ours`: geometric means over the models, which docs/performance.md has, and each model."""

import argparse
import csv
import math
import os


NAMES = {
    "mxfp4": "MXFP4",
    "fp8": "FP8 block",
    "fp8-token": "FP8 token",
    "fp8-static": "FP8 static",
    "int4": "INT4 g128",
    "nvfp4": "NVFP4",
    "w4a8": "W4A8",
    "mxfp4-fp8": "MXFP4 x FP8",
    "mxfp4-mxfp4": "MXFP4 x MXFP4",
    "nvfp4-nvfp4": "NVFP4 x NVFP4",
}


# Parts of the names of files that have no peers.
OWN = ("zipf", "mxfp4-mxfp4", "nvfp4-nvfp4")


def read_peers(path):
    with open(path, newline="") as file:
        return {
            (row["model"], row["format"], int(row["num_tokens"])): row
            for row in csv.DictReader(file)
        }


def peers_format(scheme):
    return "mxfp4-fp8" if scheme == "mxfp4_fp8" else scheme.split("_")[0]


def us(milliseconds):
    value = 1e3 * float(milliseconds)
    return value, f"{value:.1f}" if value < 100 else f"{value:.0f}"


def geomean(values):
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def read_rows(path):
    with open(path, newline="") as file:
        return [row for row in csv.DictReader(file) if row["median_ms"] != "-"]


def peers_of(path, peers):
    """Those of a file. Peers ran with balanced routing only. Those of FP8 are the best of any
    scaling."""
    alone = any(text in os.path.basename(path) for text in OWN)
    return {} if alone else peers


def read_ratios(path, peers):
    """(model, tokens) -> time / floor, and best peer / ours or None"""
    ratios = {}
    for row in read_rows(path):
        tokens, time = int(row["tokens"]), float(row["median_ms"])
        peer = peers.get((row["model"], peers_format(row["scheme"]), tokens))
        gain = float(peer["peer_us"]) / (1e3 * time) if peer else None
        ratios[row["model"], tokens] = time / float(row["floor_ms"]), gain
    return ratios


def ratio_cell(cells):
    """Of some models with one number of tokens: geometric means of the two ratios."""
    floors = [ratio for ratio, _ in cells]
    gains = [gain for _, gain in cells if gain]
    if not floors:
        return ""
    text = f"{geomean(floors):.2f} x floor"
    return text + (f"<br>peer {geomean(gains):.2f} x" if gains else "")


def print_ratios(paths, peers):
    # results/h200-COMMIT-NAME.csv
    names = [os.path.splitext(os.path.basename(path))[0].split("-", 2)[2] for path in paths]
    names = [NAMES.get(name, name) for name in names]
    files = {name: read_ratios(path, peers_of(path, peers)) for name, path in zip(names, paths)}
    sizes = sorted({tokens for cells in files.values() for _, tokens in cells})
    head = " | ".join(["1 token"] + [str(size) for size in sizes[1:]])
    print(f"| weights | {head} | behind |")
    print("| --- " * (len(sizes) + 2) + "|")
    for name, cells in files.items():
        texts = [ratio_cell([cell for (_, t), cell in cells.items() if t == size]) for size in sizes]
        gains = [gain for _, gain in cells.values() if gain]
        behind = f"{sum(gain < 1 / 1.02 for gain in gains)} of {len(gains)}" if gains else ""
        print(f"| {name} | " + " | ".join(texts) + f" | {behind} |")
    print(f"\n| weights, model | {head} |")
    print("| --- " * (len(sizes) + 1) + "|")
    for name, cells in files.items():
        for model in dict.fromkeys(model for model, _ in cells):
            here = [cells[model, size] for size in sizes if (model, size) in cells]
            texts = [f"{ratio:.2f}" + (f", {gain:.2f}" if gain else "") for ratio, gain in here]
            print(f"| {name} {model} | " + " | ".join(texts) + " |")


def print_table(path, peers):
    rows = read_rows(path)
    sizes = sorted({int(row["tokens"]) for row in rows})
    cells, ratios, gains = {}, [], []
    for row in rows:
        key = (row["model"], peers_format(row["scheme"]), int(row["tokens"]))
        time, time_text = us(row["median_ms"])
        floor, floor_text = us(row["floor_ms"])
        cell = f"{time_text} / {floor_text} = {time / floor:.2f}x"
        ratios.append(time / floor)
        if key in peers:
            peer = float(peers[key]["peer_us"])
            gains.append(peer / time)
            cell += f" ({peer:.0f}){'!' if time > 1.02 * peer else ''}"
        cells[row["model"], key[2]] = cell
    print(f"### {os.path.splitext(os.path.basename(path))[0]}\n")
    print("| model | " + " | ".join(f"M={size}" for size in sizes) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    for model in dict.fromkeys(row["model"] for row in rows):
        print(f"| {model} | " + " | ".join(cells.get((model, size), "") for size in sizes) + " |")
    if ratios:
        text = f"\nGeometric mean: {geomean(ratios):.2f} times the floor"
        print(text + (f", {geomean(gains):.2f} times as fast as the best peer" if gains else "") + ".")
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True, help="CSV: model, format, num_tokens, peer_us")
    parser.add_argument("--ratios", action="store_true")
    parser.add_argument("results", nargs="+", help="CSV of fusedmoe bench")
    arguments = parser.parse_args()
    peers = read_peers(arguments.peers)
    if arguments.ratios:
        print_ratios(arguments.results, peers)
        return
    for path in arguments.results:
        print_table(path, peers_of(path, peers))


if __name__ == "__main__":
    main()
