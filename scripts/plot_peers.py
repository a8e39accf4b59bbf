#!/usr/bin/env python3
"""Draws how far fusedmoe and the best peer are from what the GPU allows: bars of time over floor.

The picture of the README and of docs/performance.md is made by
  scripts/plot_peers.py --peers bench/peers-h200.csv -o docs/speed-h200.svg \\
      bench/results/h200-{5c71b12-{mxfp4,bf16},798343d-fp8,5c71b12-{int4,nvfp4},798343d-w4a8}.csv
"""
import argparse
import csv
import math
import sys

OURS, PEER = "#0b62a4", "#d9730d"
TITLES = {
    "mxfp4_w4a16": "MXFP4",
    "bf16": "bf16",
    "fp8_block": "FP8",
    "int4_g128": "INT4",
    "nvfp4_w4a16": "NVFP4",
    "w4a8": "W4A8",
}
# Where the reader's pages are dark, the picture is too; matplotlib knows one look alone.
DARK = """<style type="text/css">@media (prefers-color-scheme: dark) {
  [style*="fill: #ffffff"] { fill: #1e2129 !important }
  [style*="fill: #0b62a4"] { fill: #4c9be0 !important }
  [id^="text_"] { fill: #d5d8dd }
  [style*="stroke: #000000"] { stroke: #d5d8dd !important }
}</style>
"""
HALVES = (("1 to 128 tokens", 1, 128), ("512 to 8192 tokens", 512, 8192))


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


def ratios(files, peers, least, most):
    """A (scheme, ours, best peer) for each file: geometric means of time over floor."""
    for scheme, models in files:
        kind = scheme.split("_")[0]
        cells = [(m, t) for m, times in models.items() for t in times if least <= t <= most]
        # Each side is divided by the floor of its own routing: the draws hit other experts.
        ours = geomean([models[m][t][0] / models[m][t][1] for m, t in cells])
        peer = geomean([peers[m, kind, t][0] / peers[m, kind, t][1] for m, t in cells])
        yield scheme, ours, peer


def draw(axis, bars):
    for offset, color, label, side in ((-0.2, OURS, "fusedmoe", 1), (0.2, PEER, "best peer", 2)):
        places = [i + offset for i in range(len(bars))]
        heights = [bar[side] for bar in bars]
        axis.bar(places, heights, 0.38, color=color, label=label)
        for place, height in zip(places, heights):
            axis.annotate(f"{height:.1f}", (place, height + 0.04), ha="center", fontsize=8.5)
    axis.axhline(1, color="black", linewidth=1, linestyle=":")
    axis.set_xticks(range(len(bars)), [TITLES.get(bar[0], bar[0]) for bar in bars])
    axis.tick_params(length=0)
    axis.margins(x=0.02)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", required=True, help="CSV: model, format, num_tokens, peer_us")
    parser.add_argument("-o", "--output", default="speed.svg", help="picture to write")
    parser.add_argument("results", nargs="+", help="CSVs of fusedmoe bench")
    options = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_peers.py needs matplotlib (Debian: python3-matplotlib); nothing was drawn")
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "fusedmoe", "font.size": 10})
    from matplotlib import pyplot  # after the backend is chosen

    peers = read_peers(options.peers)
    files = [read_ours(path) for path in options.results]
    # On a ground of its own, which pages of any colour can show, at the 800 px that a README has.
    figure, axes = pyplot.subplots(1, 2, figsize=(8.4, 3.3), sharey=True, facecolor="white")
    for axis, (title, least, most) in zip(axes, HALVES):
        draw(axis, list(ratios(files, peers, least, most)))
        axis.set_title(title, fontsize=10)
    axes[0].set_ylabel("time / hardware floor")
    axes[0].legend(frameon=False, loc="upper left", ncols=2)
    figure.suptitle("One MoE layer on one H200: lower is better", fontsize=12, weight="bold")
    figure.tight_layout()
    svg = options.output.endswith(".svg")
    figure.savefig(options.output, metadata={"Date": None} if svg else None)
    if svg:
        with open(options.output, "r+", encoding="utf-8") as file:
            picture = file.read().replace("</defs>", DARK + "</defs>", 1)
            file.seek(0)
            file.write(picture)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
