#!/usr/bin/python3
"""Draws the curves of attn_bench: plot.py RESULTS.json [FOLDER]

Writes time, memory, error, causal error, backward and decode pictures as PNG and SVG. An operator has one colour in all
of them: a hue for its family and a shade for itself. Causal is dashed. Needs matplotlib.
"""
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

sys.dont_write_bytecode = True  # the folder of the sources stays as it is

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedFormatter, FixedLocator, LogLocator

from plot_common import (FAMILIES, common_length, length_axis, memory, not_run, read, remark, save, seconds,
                         title, tokens, value_axis, write_not_run)
from plot_error import error_pictures

# --- curves, one panel per family --------------------------------------------------------------------------------------
MARKERS, DASHES = "osD^vPX*<>", ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.2, 1, 1.2)))


def markers_of(curves):
    """By a curve's name: in a panel of many shades of one hue, each operator has a marker too, hollow when causal."""
    operators = list(dict.fromkeys(c.operator for c in curves))
    return {c.name: {"marker": MARKERS[operators.index(c.operator) % len(MARKERS)], "linestyle": c.dashes,
                     "markerfacecolor": "white" if c.causal else c.colour} for c in curves}


def draw(axes, curves, key, faint=False):
    styles = markers_of(curves)
    for c in curves:
        x, y = c.line(key)
        if faint:
            axes.plot(x, y, color="#e2e2e2", linewidth=0.8, zorder=1)
        else:
            axes.plot(x, y, color=c.colour, linewidth=0.9 if c.causal else 1.4, markersize=3.2 if c.causal else 4,
                      zorder=3, **styles[c.name])
            alone = [n for n in x if c.runs[n] == 1]
            axes.plot(alone, [c.at[n][key] for n in alone], "x", color=c.colour, markersize=6, zorder=4)


def heights_apart(heights, gap, low, high):
    """Where names go that belong at these heights, lowest first: as near as their neighbours and the panel allow."""
    touching = []  # runs of names that touch: heights less the gaps below them, whose mean is where the run lies
    for n, height in enumerate(heights):
        touching.append([height - n * gap])
        while len(touching) > 1 and mean(touching[-2]) > mean(touching[-1]):
            touching[-2:] = [touching[-2] + touching[-1]]
    places, most = [mean(run) for run in touching for _ in run], max(low, high - (len(heights) - 1) * gap)
    return [min(max(place, low), most) + n * gap for n, place in enumerate(places)]


def names_at_ends(axes, ends, styles, names={}):
    """Names right of the panel, for the last points (x, y, curve), lowest first, each behind a sample of its line,
    from where a thin line leads to a point within the panel."""
    points = 72 / axes.figure.dpi
    bottom, top = (axes.transAxes.transform((0, y))[1] * points for y in (0, 1))
    heights = [axes.transData.transform(end[:2])[1] * points for end in ends]
    places = heights_apart(heights, 12, bottom + 5, top - 2)
    for (x, y, c), place in zip(ends, places):
        at = (place - bottom) / (top - bottom)  # of the panel
        axes.plot([1.01, 1.045, 1.08], [at] * 3, transform=axes.transAxes, clip_on=False, markevery=[1], color=c.colour,
                  linewidth=1.4, markersize=4.5, **styles[c.name])
        if x < axes.get_xlim()[1]:
            axes.annotate("", (x, y), xytext=(1.01, at), textcoords="axes fraction", annotation_clip=False,
                          arrowprops={"arrowstyle": "-", "color": c.colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2})
        axes.annotate(names.get(c.name, c.operator), (1.09, at), xycoords="axes fraction", xytext=(3, 0),
                      textcoords="offset points", color=c.colour, fontsize=9, fontweight="bold", va="center")


def names_in(axes, curves, key):
    """The operators' names right of the panel, where their longest curves end."""
    longest = {}
    for c in sorted(curves, key=lambda c: (max(c.line(key)[0]), not c.causal)):
        longest[c.operator] = c
    ends = [(axes.get_xlim()[1], c.line(key)[1][-1], c) for c in longest.values()]
    names_at_ends(axes, sorted(ends, key=lambda end: end[1]), markers_of(curves))


def guides(axes, curves, key):
    """Dotted lines of slope 1 and 2 through the lower left, to read the exponents by."""
    low, high = axes.get_xlim()
    bottom, top = axes.get_ylim()
    for power, text in ((1, "∝ L"), (2, "∝ L²")):
        end = min(high, low * (top / bottom) ** (1 / power))
        axes.plot([low, end], [bottom, bottom * (end / low) ** power], color="#b5b5b5", linewidth=0.8, linestyle=":",
                  zorder=0)
        at = end ** 0.9 * low ** 0.1
        axes.annotate(text, (at, bottom * (at / low) ** power), fontsize=8, color="#9a9a9a", ha="center", va="center",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5}, zorder=0.5)
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, top)


def ranking(axes, curves, key, written, what, base):
    """Every operator at one length: a full dot, and a hollow one for its causal form. What was not run there says so."""
    length = common_length(curves)
    rows = defaultdict(dict)
    for c in curves:
        rows[c.operator][c.causal] = c

    def value(c):
        return c.at[length][key] if length in c.at else None

    order = sorted(rows.values(), key=lambda r: -max(value(c) or 0 for c in r.values()))
    axes.set_xscale("log", base=base)
    for i, row in enumerate(order):
        for causal, c in row.items():
            if value(c) is not None:
                axes.plot([max(value(c), 1e-9)], [-i], "o", markersize=6, color=c.colour, markeredgewidth=1.5,
                          markerfacecolor="white" if causal else c.colour, zorder=2 if causal else 3)
        absent = [c for c in row.values() if value(c) is None]
        if absent:
            form = f"{'causal: ' if absent[0].causal else 'bidirectional: '}" * (len(absent) < len(row))
            axes.text(0.995, -i, f"{form}no figure at {tokens(length)} tokens", transform=axes.get_yaxis_transform(),
                      fontsize=8, color="#777777", ha="right", va="center")
    axes.set_ylim(0.6 - len(order), 0.6)
    axes.yaxis.set_major_locator(FixedLocator([-i for i in range(len(order))]))
    axes.yaxis.set_major_formatter(FixedFormatter([next(iter(row.values())).operator for row in order]))
    for label, row in zip(axes.get_yticklabels(), order):
        label.set(color=next(iter(row.values())).colour, fontweight="bold", fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    value_axis(axes.xaxis, written, base)
    axes.xaxis.set_major_locator(LogLocator(base=base, numticks=6))
    axes.set_title(f"{what} at {tokens(length)} tokens", fontsize=10, color="#555555", loc="left", fontweight="bold")


def curve_picture(context, curves, folder, name, heading, key, written, what, base, wanted):
    curves = [c for c in curves if max(c.line(key)[1]) > 0]
    for c in curves:  # a logarithmic axis has no 0: the few that need nothing at some length start later
        c.at = {n: row for n, row in c.at.items() if row[key] > 0}
    if not curves:
        return
    families = [(f, [c for c in curves if c.operator in members]) for f, members in FAMILIES.items()]
    known = {c.operator for _, members in families for c in members}
    families.append(("others", [c for c in curves if c.operator not in known]))
    families = [(f, members) for f, members in families if members]
    columns = min(3, len(families))
    lines = math.ceil(len(families) / columns)
    panel, names = 3.0, 2.4  # inches, as below; names are those of a panel's curves
    wide, ranked = 0.9 + (panel + names) * columns, 0.18 * len({c.operator for c in curves})
    absent = not_run(context, wanted, int(17 * wide))
    foot = 0.4 + 0.15 * len(absent)
    panels, below = 3.55 * lines, ranked + 0.75 + foot
    high = 0.9 + panels + below
    figure = plt.figure(figsize=(wide, high))
    grid = figure.add_gridspec(lines, columns, left=0.9 / wide, right=1 - names / wide, bottom=(below + 0.35) / high,
                               top=1 - 1.15 / high, wspace=names / panel, hspace=0.3)
    values = [y for c in curves for y in c.line(key)[1]]
    for at, (family, members) in enumerate(families):
        axes = figure.add_subplot(grid[at // columns, at % columns])
        axes.set_yscale("log", base=base)
        axes.set_ylim(min(values) / 1.7, max(values) * 1.7)
        draw(axes, [c for c in curves if c not in members], key, faint=True)
        draw(axes, members, key)
        length_axis(axes, curves, "length (tokens)" if at + columns >= len(families) else "")
        axes.set_title(family, fontsize=10, color="#555555", loc="left", fontweight="bold")
        names_in(axes, members, key)
        if base == 10:
            guides(axes, curves, key)
        value_axis(axes.yaxis, written, base)
    labels = 2.3 / wide
    ranking(figure.add_axes((labels, foot / high, 0.985 - labels, ranked / high)), curves, key, written, what, base)
    title(figure, heading, context)
    alone = any(runs == 1 for c in curves for runs in c.runs.values())
    remark(figure, "solid, filled: bidirectional   dashed, hollow: causal" + "   ×: a single run" * alone)
    write_not_run(figure, absent)
    save(figure, folder, name)


# --- decoding ---------------------------------------------------------------------------------------------------------
def decode_picture(context, curves, folder):
    """All in one panel: beside its colour, each curve has a marker and dashes that no other has of one hue."""
    absent = not_run(context, lambda c: c.decode, 190)
    foot, panel = 0.58 + 0.15 * len(absent), max(3.26, 0.175 * len(curves))  # inches
    high = foot + panel + 0.96
    figure = plt.figure(figsize=(13, high))
    left, right = (figure.add_axes((x, foot / high, 0.265, panel / high)) for x in (0.055, 0.545))
    styles = {c.name: {"marker": MARKERS[n % len(MARKERS)], "linestyle": DASHES[n % len(DASHES)]}
              for n, c in enumerate(curves)}
    names = {}
    for c in curves:
        sequences = int(next(iter(c.at.values())).get("sequences", 1))
        for row in c.at.values():
            row["ms_of_one"] = row["best_ms"] / sequences
        names[c.name] = c.operator + (f", of {sequences}" if sequences > 1 else "")
    for axes, key, name in ((left, "ms_of_one", "time of one token of one sequence"),
                            (right, "of_bandwidth", "share of the memory bandwidth (states too large for the caches)")):
        ends = []
        shown = [c for c in curves if all(key in row for row in c.at.values())]
        for c in sorted(shown, key=lambda c: c.line(key)[1][-1]):
            x, y = c.line(key)
            axes.plot(x, y, color=c.colour, linewidth=1.6, markersize=4.5, **styles[c.name])
            ends.append((x[-1], y[-1], c))
        length_axis(axes, curves, "tokens in the cache")
        axes.set_title(name, fontsize=10, color="#666666", loc="left")
        if key == "ms_of_one":
            axes.set_yscale("log")
            value_axis(axes.yaxis, seconds)
        else:
            axes.set_ylim(0, max([1.0] + [1.05 * max(c.line(key)[1]) for c in shown]))
        names_at_ends(axes, ends, styles, names)
    title(figure, "Decoding: one more token", context)
    heads = context.get("heads", "8")
    remark(figure, f"{4 * int(heads)} query heads over {heads} key/value heads, aft {heads} over {heads}")
    write_not_run(figure, absent)
    save(figure, folder, "decode")


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    context, curves = read(sys.argv[1])
    folder = Path(sys.argv[2] if len(sys.argv) == 3 else Path(sys.argv[1]).parent)
    folder.mkdir(parents=True, exist_ok=True)
    whole = [c for c in curves if not c.decode and not c.backward]
    backward, decode = [c for c in curves if c.backward], [c for c in curves if c.decode]
    if whole:
        def forward(c):
            return not c.decode and not c.backward

        curve_picture(context, whole, folder, "time", "Time against length", "best_ms", seconds, "time", 10, forward)
        error_pictures(context, whole, folder)
        curve_picture(context, whole, folder, "memory", "Scratch memory against length", "scratch_bytes", memory,
                      "scratch", 2, forward)
    if backward:
        curve_picture(context, backward, folder, "backward", "Time of the backward pass against length", "best_ms",
                      seconds, "time", 10, lambda c: c.backward)
    if decode:
        decode_picture(context, decode, folder)


if __name__ == "__main__":
    main()
