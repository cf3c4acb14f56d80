#!/usr/bin/python3
"""Draws attn beside other libraries: plot_peers.py RESULTS.json FOLDER

The results are those of bench/run --peers. Writes peers as PNG and SVG into the folder. Needs matplotlib.
"""
import json
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # the folder of the sources stays as it is

import matplotlib.pyplot as plt

from plot_common import FAINT, INK, save, seconds, title, value_axis

SHADES = ["#e07b00", "#1f77d0", "#2e8b3d", "#8e3bb0"]  # of peers; attn is black
ROW, HEAD, FOOT = 0.27, 0.95, 0.62  # inches


def counts(row, version):
    """Whether there is a time of the peer, and of the same result."""
    peer = row["peers"].get(version, {})
    return "ms" in peer and not peer.get("differs")


def draw(results):
    context, versions = results["context"], results["peers"]
    rows = [row for row in results["rows"] if any(counts(row, v) for v in versions)]
    height = HEAD + FOOT + ROW * len(rows)
    figure = plt.figure(figsize=(11, height))
    axes = figure.add_axes((0.285, FOOT / height, 0.44, 1 - (HEAD + FOOT) / height))
    places = range(len(rows))
    for y, row in zip(places, rows):
        times = [row["attn_ms"]] + [row["peers"][v]["ms"] for v in versions if counts(row, v)]
        axes.plot([min(times), max(times)], [y, y], color=FAINT, linewidth=2, zorder=1)
    axes.scatter([row["attn_ms"] for row in rows], places, color=INK, s=34, zorder=3, label="attn")
    for n, (version, shade) in enumerate(zip(versions, SHADES)):
        having = [(row, y) for row, y in zip(rows, places) if counts(row, version)]
        axes.scatter([row["peers"][version]["ms"] for row, _ in having], [y for _, y in having], color=shade, s=34,
                     zorder=2, label=version)
        left = 1.02 + 0.2 * n  # of the column of ratios, as a share of the axes
        axes.text(left, 1.01, version, transform=axes.transAxes, fontsize=8.5, color=shade, va="bottom")
        for row, y in having:
            axes.text(left, y, f"{row['peers'][version]['ms'] / row['attn_ms']:.2g} ×", color=shade, fontsize=9,
                      transform=axes.get_yaxis_transform(), va="center")
    axes.set_yticks(list(places), [f"{row['name']}  ({row['shape']})" for row in rows], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    value_axis(axes.xaxis, seconds)
    axes.set_xlabel("time of a call; columns: how many times as long as attn takes")
    axes.grid(axis="y", visible=False)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, ncols=1 + len(versions),
                  loc="upper right", bbox_to_anchor=(0.99, 1 - 0.02 / height))
    commit = f", attn {context['commit']}" if context.get("commit") else ""
    title(figure, "attn beside other libraries", {**context, "compiler": f"{context.get('compiler')}"})
    figure.text(0.012, 1 - 0.66 / height, f"operator/tokens; measured in turns, {context.get('date')}{commit}",
                fontsize=9, va="top", color="#666666")
    return figure


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    results = json.loads(Path(sys.argv[1]).read_text())
    if not any(counts(row, v) for row in results["rows"] for v in results["peers"]):
        sys.exit("plot_peers.py: no figures of any peer")
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    save(draw(results), folder, "peers")


if __name__ == "__main__":
    main()
