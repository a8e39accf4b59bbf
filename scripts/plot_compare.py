#!/usr/bin/env python3
"""Draws the JSON of `fusedmoe compare --json`: error against stored bytes and against time.

Usage: plot_compare.py [COMPARE.json | -] [-o PICTURE.png]
"""
import argparse
import json
import sys

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("json", nargs="?", default="-", help="file, or - for standard input")
parser.add_argument("-o", "--output", default="compare.png", help="picture to write")
options = parser.parse_args()

try:
    import matplotlib
except ImportError:
    sys.exit("plot_compare.py needs matplotlib (Debian: python3-matplotlib); nothing was drawn")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (after the backend is chosen)

with sys.stdin if options.json == "-" else open(options.json, encoding="utf-8") as file:
    comparison = json.load(file)
rows = comparison["rows"]
if not rows:
    sys.exit("no schemes to draw")

figure, axes = pyplot.subplots(1, 2, figsize=(13, 6), sharey=True)
for axis, key, label in zip(
    axes, ("bits_per_weight", "ms"), ("stored bits per weight", "milliseconds per forward")
):
    axis.scatter([row[key] for row in rows], [row["relative_error"] for row in rows])
    for row in rows:
        axis.annotate(
            row["scheme"],
            (row[key], row["relative_error"]),
            textcoords="offset points",
            xytext=(4, 3),
            fontsize=7,
        )
    axis.set_xlabel(label)
    axis.set_yscale("log")
    axis.grid(True, alpha=0.3)
axes[1].set_xscale("log")
axes[0].set_ylabel("relative error against f32")
figure.suptitle(
    "{layer}: {num_experts} experts of {hidden} x {intermediate}, top-{topk}, "
    "{num_tokens} tokens, {dtype}".format(**comparison)
)
figure.tight_layout()
figure.savefig(options.output, dpi=150)
print(f"wrote {options.output}")
