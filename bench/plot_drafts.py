#!/usr/bin/python3
"""Draws what a token costs in a step of several: plot_drafts.py FOLDER RESULTS.json...

Each file is of attn_bench with another --step-tokens, over one length. Writes drafts as PNG and SVG into the folder,
and prints a table of milliseconds. Needs matplotlib.
"""
import sys
from collections import defaultdict
from pathlib import Path

sys.dont_write_bytecode = True  # the folder of the sources stays as it is

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from plot_common import read, remark, save, seconds, title, tokens, value_axis

SHADES = ["#1a1a1a", "#1f77d0", "#e07b00", "#2e8b3d", "#8e3bb0", "#d1344b", "#8d6e63", "#00838f"]


def read_all(paths):
    """The context of the last file, for every cache its milliseconds by tokens of a step, and the length of caches."""
    times, lengths, context = defaultdict(dict), set(), {}
    for path in paths:
        context, curves = read(path)
        for curve in curves:
            for length, row in curve.at.items():
                step = dict(part.split("=") for part in row.get("label", "").split() if "=" in part)
                times[curve.name][int(step.get("step-tokens", 1))] = row["best_ms"]
                lengths.add(length)
    if len(lengths) != 1:
        sys.exit(f"plot_drafts.py: expected results of one length; found {sorted(lengths)}")
    return context, times, lengths.pop()


def name_of(curve, context):
    return curve.partition("_over_")[2] or context.get("type", "float")


def print_table(times, counts, context):
    print("ms, tokens of a step".ljust(22) + "".join(f"{n:8}" for n in counts))
    for curve, by_tokens in times.items():
        print(name_of(curve, context).ljust(22) + "".join(f"{by_tokens.get(n, float('nan')):8.3g}" for n in counts))


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    context, times, length = read_all(sys.argv[2:])
    figure = plt.figure(figsize=(11, 4.8))
    left, right = (figure.add_axes((x, 0.125, 0.34, 0.685)) for x in (0.065, 0.485))
    counts = sorted({n for by_tokens in times.values() for n in by_tokens})
    slowest_last = sorted(times.items(), key=lambda item: item[1][max(item[1])] / max(item[1]))
    for axes, per_token, name in ((left, False, "time of a step"), (right, True, "time of a step, over its tokens")):
        for shade, (cache, by_tokens) in zip(SHADES, sorted(times.items())):
            x = sorted(by_tokens)
            y = [by_tokens[n] / (n if per_token else 1) for n in x]
            axes.plot(x, y, color=shade, linewidth=2, marker="o", markersize=3.5,
                      label=name_of(cache, context))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(counts))
        axes.xaxis.set_major_formatter(FixedFormatter([str(n) for n in counts]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yscale("log", base=2)
        value_axis(axes.yaxis, seconds, 2)
        axes.set_xlabel("tokens of a step")
        axes.set_title(name, fontsize=10, color="#666666", loc="left")
    handles, labels = right.get_legend_handles_labels()
    by_label = dict(zip(labels, handles))
    order = [name_of(cache, context) for cache, _ in reversed(slowest_last)]
    right.legend([by_label[text] for text in order], order, title="cache of", frameon=False, loc="center left",
                 bbox_to_anchor=(1.02, 0.5))
    title(figure, f"Drafts: steps of several tokens, {tokens(length)} in the cache", context)
    heads = context.get("heads", "8")
    remark(figure, f"{4 * int(heads)} query heads over {heads} key/value heads")
    save(figure, folder, "drafts")
    print_table(times, counts, context)


if __name__ == "__main__":
    main()
