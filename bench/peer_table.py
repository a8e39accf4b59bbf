#!/usr/bin/env python3
"""Prints CSVs of `fusedmoe bench --csv` as Markdown: a table for each file, with a cell
`time / floor = ratio` in us for each model and number of tokens and, where peers were measured on
the same routing, the best one's time. A cell that is more than 2 % slower than that has a "!"."""

import argparse
import csv
import math
import os


def read_peers(path):
    with open(path, newline="") as file:
        return {
            (row["model"], row["format"], int(row["num_tokens"])): row
            for row in csv.DictReader(file)
        }


def us(milliseconds):
    value = 1e3 * float(milliseconds)
    return value, f"{value:.1f}" if value < 100 else f"{value:.0f}"


def geomean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def print_table(path, peers):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    rows = [row for row in rows if row["median_ms"] != "-"]
    sizes = sorted({int(row["tokens"]) for row in rows})
    cells, ratios, gains = {}, [], []
    for row in rows:
        key = (row["model"], row["scheme"].split("_")[0], int(row["tokens"]))
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
    parser.add_argument("results", nargs="+", help="CSV of fusedmoe bench")
    arguments = parser.parse_args()
    peers = read_peers(arguments.peers)
    for path in arguments.results:
        # Peers ran with balanced routing only, and none quantizes activations to FP4. Those of FP8
        # are the best of any scaling.
        name = os.path.basename(path)
        alone = any(text in name for text in ("zipf", "mxfp4-mxfp4", "nvfp4-nvfp4"))
        print_table(path, {} if alone else peers)


if __name__ == "__main__":
    main()
