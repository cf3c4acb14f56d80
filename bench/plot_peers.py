#!/usr/bin/python3
"""Draws attn beside other libraries: plot_peers.py RESULTS.json FOLDER

The results are those of bench/run --peers. Writes peers as PNG and SVG into the folder. Needs matplotlib.
"""
import json
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # the folder of the sources stays as it is

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import matplotlib.pyplot as plt

from cases import LENGTH, case, shape_of, threads_of, times_as_long
from plot_common import FAINT, INK, save, seconds, value_axis

SHADES = ["#e07b00", "#1f77d0", "#2e8b3d", "#8e3bb0"]  # of peers; attn is black
ROW, HEAD, FOOT = 0.27, 1.05, 0.62  # inches
USUAL = shape_of(case("full_softmax"))


def counts(row, version):
    """Whether there is a time of the peer, and of the same result."""
    peer = row["peers"].get(version, {})
    return "ms" in peer and not peer.get("differs")


def name_of(row):
    """The shape is named where it is not the usual one."""
    name, length = row["name"].split("/")
    tokens = [f"{length} tokens"] if int(length) != LENGTH else []
    unusual = ", ".join(tokens + [row["shape"]] * (row["shape"] != USUAL))
    return name + (f", {unusual}" if unusual else "")


def draw(results):
    context, versions = results["context"], results["peers"]
    rows = [row for row in results["rows"] if any(counts(row, v) for v in versions)]
    height = HEAD + FOOT + ROW * len(rows)
    figure = plt.figure(figsize=(11, height))
    axes = figure.add_axes((0.335, FOOT / height, 0.4, 1 - (HEAD + FOOT) / height))
    places = range(len(rows))
    for y, row in zip(places, rows):
        times = [row["attn_ms"]] + [row["peers"][v]["ms"] for v in versions if counts(row, v)]
        axes.plot([min(times), max(times)], [y, y], color=FAINT, linewidth=2, zorder=1)
    axes.scatter([row["attn_ms"] for row in rows], places, color=INK, s=34, zorder=3, label="attn")
    for n, version in enumerate(versions):
        shade = SHADES[n % len(SHADES)]
        having = [(row, y) for row, y in zip(rows, places) if counts(row, version)]
        axes.scatter([row["peers"][version]["ms"] for row, _ in having], [y for _, y in having], color=shade, s=34,
                     zorder=2, label=version)
        left = 1.03 + min(0.25, 0.6 / len(versions)) * n  # of the column of ratios, as a share of the axes
        axes.text(left, 1.005, "\n".join(version.rsplit(" ", 1)), transform=axes.transAxes, fontsize=8.5, color=shade,
                  va="bottom")
        for row, y in having:
            axes.text(left, y, times_as_long(row["peers"][version]["ms"] / row["attn_ms"]), color=shade, fontsize=9,
                      transform=axes.get_yaxis_transform(), va="center")
    axes.set_yticks(list(places), [name_of(row) for row in rows], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("log")
    value_axis(axes.xaxis, seconds)
    axes.set_xlabel("time of a call; right: as a multiple of attn's")
    axes.grid(axis="y", visible=False)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=9, ncols=1 + len(versions),
                  loc="upper right", bbox_to_anchor=(0.99, 1 - 0.02 / height))
    commit = f" {context['commit']}" if context.get("commit") else ""
    figure.text(0.012, 1 - 0.15 / height, "attn beside other libraries", fontsize=14, fontweight="bold", va="top",
                color="#111111")
    lines = (f"{LENGTH} tokens, {USUAL}, unless named; {threads_of(context)}, in turns  ·  {context.get('processor')}, "
             f"{context.get('compiler')}: {context.get('peak_gflops')} Gflop/s per core  ·  attn{commit}, "
             f"{context.get('date')}")
    figure.text(0.012, 1 - 0.47 / height, lines, fontsize=9, va="top", color="#666666")
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
