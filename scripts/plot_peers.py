#!/usr/bin/env python3
"""Draws how far fusedmoe and the best peer are from what the GPU allows, by number of tokens.

The README's picture is made by
  scripts/plot_peers.py --peers bench/peers-h200.csv -o docs/speed-h200.svg \\
      bench/results/h200-5c71b12-{mxfp4,bf16,fp8,int4,nvfp4,w4a8}.csv
"""
import argparse
import csv
import math
import sys

OURS, PEER = "#0b62a4", "#d9730d"
TITLES = {
    "mxfp4_w4a16": "MXFP4 weights, bf16 activations",
    "fp8_block": "FP8, block scales",
    "int4_g128": "INT4 weights, bf16 activations",
    "nvfp4_w4a16": "NVFP4 weights, bf16 activations",
    "w4a8": "INT4 weights, FP8 activations",
}


def read_peers(path):
    """(model, format, tokens) -> (time, floor), both in us."""
    with open(path, newline="", encoding="utf-8") as file:
        return {
            (row["model"], row["format"], int(row["num_tokens"])): (
                float(row["peer_us"]),
                float(row["floor_us"]),
            )
            for row in csv.DictReader(file)
        }


def read_ours(path):
    """The scheme, and model -> {tokens: (time, floor)} in us."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    models = {}
    for row in rows:
        cell = (1e3 * float(row["median_ms"]), 1e3 * float(row["floor_ms"]))
        models.setdefault(row["model"], {})[int(row["tokens"])] = cell
    return rows[0]["scheme"], models


def geomean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def draw(axis, path, peers):
    scheme, models = read_ours(path)
    tokens = sorted(next(iter(models.values())))
    kind = scheme.split("_")[0]
    # Each side is divided by the floor of its own routing: the draws hit other experts.
    ours = {m: [cells[t][0] / cells[t][1] for t in tokens] for m, cells in models.items()}
    peer = {m: [peers[m, kind, t][0] / peers[m, kind, t][1] for t in tokens] for m in models}
    places = range(len(tokens))  # equally far apart
    for lines, color, label in ((peer, PEER, "best peer"), (ours, OURS, "fusedmoe")):
        for line in lines.values():
            axis.plot(places, line, color=color, linewidth=0.6, alpha=0.35)
        mean = [geomean([line[i] for line in lines.values()]) for i in range(len(tokens))]
        axis.plot(places, mean, color=color, linewidth=2.4, marker="o", markersize=4, label=label)
    for place, t in zip(places, tokens):
        gain = geomean([peers[m, kind, t][0] / models[m][t][0] for m in models])
        where = {"xycoords": ("data", "axes fraction"), "ha": "center"}
        axis.annotate(f"{gain:.2f}x", (place, 0.03), **where)
    axis.annotate("times as fast as the best peer:", (0.02, 0.1), xycoords="axes fraction")
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
    top = axis.get_ylim()[1]
    axis.set_ylim(bottom=1 - 0.3 * (top - 1))  # room for the text below the floor
    axis.set_title(f"{TITLES.get(scheme, scheme)} ({len(models)} models)")
    axis.margins(x=0.08)
    axis.set_xticks(places, [str(t) for t in tokens])
    axis.set_xlabel("tokens in the batch")
    axis.grid(True, axis="y", alpha=0.25)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", required=True, help="CSV: model, format, num_tokens, peer_us")
    parser.add_argument("-o", "--output", default="speed.svg", help="picture to write")
    parser.add_argument("results", nargs="+", help="CSVs of fusedmoe bench, a panel each")
    options = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_peers.py needs matplotlib (Debian: python3-matplotlib); nothing was drawn")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "fusedmoe", "font.size": 10})
    from matplotlib import pyplot  # after the backend is chosen

    peers = read_peers(options.peers)
    columns = min(3, len(options.results))
    rows = math.ceil(len(options.results) / columns)
    size = (5.2 * columns, 3.7 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(options.results) :]:
        axis.set_visible(False)
    for axis, path in zip(axes.flat, options.results):
        draw(axis, path, peers)
    for row in axes:
        row[0].set_ylabel("time / hardware floor")
    axes[0][0].legend(frameon=False, loc="upper right")
    figure.tight_layout()
    svg = options.output.endswith(".svg")
    figure.savefig(options.output, metadata={"Date": None} if svg else None)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
