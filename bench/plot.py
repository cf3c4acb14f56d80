#!/usr/bin/python3
"""Draws the curves of attn_bench: plot.py RESULTS.json [FOLDER]

Writes time, memory, error, backward and decode pictures as PNG and SVG. An operator has one colour in all of them: a hue for its
family and a shade for itself. Causal is dashed. Needs matplotlib.
"""
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from matplotlib.transforms import Bbox

COLOURS = {
    "full_softmax": "#1a1a1a", "sliding_window": "#1f77d0", "block": "#0b4f8a", "strided": "#56b4e9",
    "bigbird": "#00838f", "lsh": "#5c6bc0",
    "linformer": "#e07b00", "nystrom": "#b34700", "long_short": "#f2b134",
    "linear": "#2e8b3d", "performer": "#7cb518", "rfa": "#0f5c2e",
    "aft_full": "#8e3bb0", "aft_local": "#c774d8", "aft_simple": "#5b2a86", "aft_conv": "#e377c2",
    "fnet": "#d1344b",
}
FAMILIES = {
    "exact softmax over chosen keys": ("full_softmax", "sliding_window", "block", "strided", "fixed", "bigbird", "lsh"),
    "low rank": ("linformer", "nystrom", "long_short"),
    "kernels": ("linear", "performer", "rfa"),
    "attention-free": ("aft_full", "aft_local", "aft_simple", "aft_conv"),
    "Fourier": ("fnet",),
}
SPARE = ["#8c6d5a", "#7f7f7f", "#a3a300", "#c05780", "#3d7a7a", "#9a6324"]
INK, FAINT = "#333333", "#c9c9c9"
USUAL = 4096

plt.rcParams.update({
    "font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": "#888888", "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True,
    "grid.color": "#ececec", "grid.linewidth": 0.8, "axes.axisbelow": True,
    "figure.facecolor": "white", "savefig.facecolor": "white",
})


def colour(name):
    if name not in COLOURS:
        COLOURS[name] = SPARE[sum(map(ord, name)) % len(SPARE)]
    return COLOURS[name]


class Curve:
    """One operator, causal or not, or its decoding: figures by length, each the best of its repetitions."""

    def __init__(self, name):
        self.name = name
        self.decode = name.endswith("_decode")
        self.causal = name.endswith("_causal")
        self.backward = "_backward" in name
        self.operator = name.removesuffix("_decode").removesuffix("_causal").removesuffix("_backward")
        self.colour = colour(self.operator)
        self.dashes = (0, (4, 2)) if self.causal else "solid"
        self.at = {}  # length -> row

    def add(self, length, row):
        if length not in self.at or row["best_ms"] < self.at[length]["best_ms"]:
            self.at[length] = row

    def line(self, key, factor=1.0):
        lengths = sorted(self.at)
        return lengths, [self.at[n][key] * factor for n in lengths]

    def shown_length(self):
        return USUAL if USUAL in self.at else max(self.at)

    def usual(self):
        return self.at[self.shown_length()]


def read(path):
    results = json.loads(Path(path).read_text())
    curves = {}
    for row in results["benchmarks"]:
        if row.get("run_type") == "iteration" and "best_ms" in row:
            name, length = row["name"].split("/")[:2]
            curves.setdefault(name, Curve(name)).add(int(length), row)
            if "peak_flops" in row:  # the median of all measurements so far: the last is that of the whole run
                results["context"]["peak_gflops"] = f"{row['peak_flops'] * 1e-9:.4g}"
    return results["context"], list(curves.values())


# --- how numbers are written ------------------------------------------------------------------------------------------
def short(value, units):
    for limit, size, unit in units:
        if value < limit:
            break
    figure = value / size
    return f"{figure:.2g} {unit}" if figure < 10 else f"{figure:.0f} {unit}"


def seconds(ms):
    return short(ms, [(1, 1e-3, "µs"), (1e3, 1, "ms"), (math.inf, 1e3, "s")])


def memory(size):
    return short(size, [(2**10, 1, "B"), (2**20, 2**10, "KiB"), (2**30, 2**20, "MiB"), (math.inf, 2**30, "GiB")])


def tokens(n):
    n = int(n)
    return str(n) if n < 1024 else f"{n >> 10}K" if n < 1 << 20 else f"{n >> 20}M"


def length_axis(axes, curves, label):
    lengths = sorted({n for c in curves for n in c.at})
    low, high = lengths[0], lengths[-1]
    step = 1 if len(lengths) <= 7 else 2
    ticks = [low << i for i in range(0, 40, step) if low << i <= high]
    axes.set_xscale("log", base=2)
    axes.set_xlim(low / 1.25, high * 1.25)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter([tokens(t) for t in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def value_axis(axis, written, base=10):
    axis.set_major_locator(LogLocator(base=base, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda v, _: written(v)))
    axis.set_minor_formatter(NullFormatter())


def title(figure, text, context):
    threads = context.get("threads", "1")
    shape = f"{context.get('heads')} heads of {context.get('dim')}, {threads} thread{'s' * (threads != '1')}, float"
    where = f"{context.get('processor')}, {context.get('compiler')}: {context.get('peak_gflops')} Gflop/s per core"
    inch = 1 / figure.get_figheight()
    figure.text(0.012, 1 - 0.15 * inch, text, fontsize=14, fontweight="bold", va="top", color="#111111")
    figure.text(0.012, 1 - 0.47 * inch, f"{shape}  ·  {where}", fontsize=9, va="top", color="#666666")


def remark(figure, text):
    figure.text(0.985, 1 - 0.47 / figure.get_figheight(), text, fontsize=9, va="top", ha="right", color="#666666")


def save(figure, folder, name):
    for kind in ("png", "svg"):
        figure.savefig(folder / f"{name}.{kind}", dpi=160)
    plt.close(figure)


# --- curves, one panel per family -----------------------------------------------------------------------------------------
def draw(axes, curves, key, faint=False):
    for c in curves:
        x, y = c.line(key)
        if faint:
            axes.plot(x, y, color="#e2e2e2", linewidth=0.8, zorder=1)
        else:
            axes.plot(x, y, color=c.colour, linestyle=c.dashes, linewidth=1.2 if c.causal else 2.0, marker="o",
                      markersize=1.8 if c.causal else 2.8, zorder=3)


def names_in(axes, curves, heading, rising):
    """The panel's title, and the names in their colours in the corner that is free, highest curve first: the lower
    right where every curve rises, else the upper left."""
    axes.set_title(heading, fontsize=10, color="#555555", loc="left", fontweight="bold")
    names = list(dict.fromkeys(c.operator for c in curves))
    for i, name in enumerate(names):
        x, y, side = (0.975, 0.035 + 0.07 * (len(names) - 1 - i), "right") if rising else (0.03, 0.91 - 0.07 * i, "left")
        axes.text(x, y, name, transform=axes.transAxes, color=colour(name), fontsize=9, fontweight="bold", ha=side,
                  zorder=5, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})


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
    """Every operator at the usual length: a full dot, and a hollow one for its causal form."""
    rows = defaultdict(dict)
    for c in curves:
        rows[c.operator][c.causal] = c
    order = sorted(rows.values(), key=lambda r: -max(c.usual()[key] for c in r.values()))
    axes.set_xscale("log", base=base)
    for i, row in enumerate(order):
        for causal, c in row.items():
            axes.plot([max(c.usual()[key], 1e-9)], [-i], "o", markersize=6, color=c.colour, markeredgewidth=1.5,
                      markerfacecolor="white" if causal else c.colour, zorder=2 if causal else 3)
    names = [next(iter(row)) for row in order]
    axes.yaxis.set_major_locator(FixedLocator([-i for i in range(len(order))]))
    axes.yaxis.set_major_formatter(FixedFormatter([row[first].operator for row, first in zip(order, names)]))
    for label, row, first in zip(axes.get_yticklabels(), order, names):
        label.set(color=row[first].colour, fontweight="bold", fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    value_axis(axes.xaxis, written, base)
    axes.xaxis.set_major_locator(LogLocator(base=base, numticks=6))
    lengths = {c.shown_length() for c in curves}
    at = tokens(lengths.pop()) if len(lengths) == 1 else f"{tokens(USUAL)}, or the longest"
    axes.set_title(f"{what} at {at}", fontsize=10, color="#555555", loc="left", fontweight="bold")


def curve_picture(context, curves, folder, name, heading, key, written, what, base):
    curves = [c for c in curves if max(c.line(key)[1]) > 0]
    for c in curves:  # a logarithmic axis has no 0: the few that need nothing at some length start later
        c.at = {n: row for n, row in c.at.items() if row[key] > 0}
    families = [(f, [c for c in curves if c.operator in members]) for f, members in FAMILIES.items()]
    known = {c.operator for _, members in families for c in members}
    families.append(("others", [c for c in curves if c.operator not in known]))
    families = [(f, members) for f, members in families if members]
    columns = min(3, len(families) + 1)
    lines = math.ceil((len(families) + 1) / columns)
    figure = plt.figure(figsize=(1.2 + 4.1 * columns, 1.3 + 3.55 * lines))
    high = figure.get_figheight()
    grid = figure.add_gridspec(lines, columns, left=0.9 / figure.get_figwidth(), right=0.985, bottom=0.55 / high,
                               top=1 - 1.15 / high, wspace=0.28, hspace=0.3)
    values = [y for c in curves for y in c.line(key)[1]]
    for at, (family, members) in enumerate(families):
        axes = figure.add_subplot(grid[at // columns, at % columns])
        axes.set_yscale("log", base=base)
        axes.set_ylim(min(values) / 1.7, max(values) * 1.7)
        draw(axes, [c for c in curves if c not in members], key, faint=True)
        members = sorted(members, key=lambda c: -c.usual()[key])
        draw(axes, members, key)
        length_axis(axes, curves, "length (tokens)" if at + columns >= len(families) else "")
        names_in(axes, members, family, rising=base == 10)
        if base == 10:
            guides(axes, curves, key)
        value_axis(axes.yaxis, written, base)
    ranking(figure.add_subplot(grid[len(families) // columns, len(families) % columns]), curves, key, written, what, base)
    title(figure, heading, context)
    remark(figure, "solid, filled: bidirectional   dashed, hollow: causal")
    save(figure, folder, name)


# --- error against time -----------------------------------------------------------------------------------------------
def label_points(axes, points):
    """Names beside the points (x, y, curve), each at the nearest place that covers no point and no other name."""
    renderer = axes.figure.canvas.get_renderer()
    inside = axes.get_window_extent(renderer).padded(-1)
    reach = 6 * axes.figure.dpi / 72
    taken = []
    for line in axes.lines:
        if line.get_marker() == "o":
            x, y = axes.transData.transform(line.get_xydata()[0])
            taken.append(Bbox.from_extents(x - reach, y - reach, x + reach, y + reach))
    places = [(side, up) for up in sorted(range(-132, 133, 6), key=abs) for side in ("left", "right")]
    for x, y, c in sorted(points, key=lambda p: -p[0]):
        for side, up in places:
            out = 10 + 0.5 * abs(up)
            line = {"arrowstyle": "-", "color": c.colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 4,
                    "relpos": (0 if side == "left" else 1, 0.5)}
            text = axes.annotate(c.operator, (x, y), xytext=(out if side == "left" else -out, up),
                                 textcoords="offset points", ha=side, va="center", color=c.colour, fontsize=8.5,
                                 fontweight="bold", arrowprops=line if abs(up) > 6 else None)
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # of the words, without the line
            if inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1) and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()


def error_panel(upper, lower, curves, suffix, mean):
    """One set of real data: approximations above; what is exact but for rounding, below the break of the axis."""
    if mean:
        upper.axhline(mean, color="#999999", linewidth=1.2, linestyle=(0, (1, 1.5)), zorder=0)
    groups = defaultdict(list)  # of one operator in one of the two parts
    for c in curves:
        row = c.usual()
        error = max(row["rel_error" + suffix], 3e-8)
        axes = upper if error > 1e-4 else lower
        axes.plot(row["best_ms"], error, "o", markersize=8, color=c.colour, markeredgewidth=1.8,
                  markerfacecolor="white" if c.causal else c.colour)
        groups[axes, c.operator].append((row["best_ms"], error, c))
    for axes in (upper, lower):
        rightmost = []  # the point labelled with the operator's name
        for (part, _), points in groups.items():
            if part is axes:
                rightmost.append(max(points, key=lambda p: p[0]))
                axes.plot([p[0] for p in points], [p[1] for p in points], color=points[0][2].colour, linewidth=1,
                          linestyle=(0, (2, 2)), zorder=1)
        label_points(axes, rightmost)
        value_axis(axes.xaxis, seconds)
    upper.yaxis.set_major_locator(FixedLocator([0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10]))
    upper.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    upper.yaxis.set_minor_locator(NullLocator())
    lower.yaxis.set_major_locator(FixedLocator([1e-7, 1e-6, 1e-5]))
    lower.yaxis.set_minor_locator(NullLocator())


def error_picture(context, curves, folder):
    curves = [c for c in curves if "rel_error" in c.usual()]
    if not curves:
        return
    layers = [s for s in ("", "_1") if "rel_error" + s in curves[0].usual()]
    names = [name.strip() for name in context.get("error_data", "").split(",")] + ["", ""]
    times = [c.usual()["best_ms"] for c in curves]
    errors = [c.usual()["rel_error" + s] for c in curves for s in layers]
    figure = plt.figure(figsize=(11, 6.2))
    grid = figure.add_gridspec(2, len(layers), height_ratios=(5, 1), left=0.075, right=0.985, bottom=0.09, top=0.83,
                               hspace=0.12, wspace=0.12)
    for column, suffix in enumerate(layers):
        upper, lower = figure.add_subplot(grid[0, column]), figure.add_subplot(grid[1, column])
        for axes in (upper, lower):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlim(min(times) / 1.6, max(times) * (6 if len(layers) > 1 else 3))
        upper.set_ylim(min(min((e for e in errors if e > 1e-4), default=1) / 1.8, 0.08), max(2, 1.4 * max(errors)))
        lower.set_ylim(2e-8, 2e-5)
        upper.tick_params(which="both", bottom=False, labelbottom=False)
        upper.spines["bottom"].set_visible(False)
        mean = float(context.get("mean_error" + suffix, 0))
        error_panel(upper, lower, curves, suffix, mean)
        baseline = f"   ·····  baseline: mean of the values, {mean:.2f}" if mean else ""
        upper.set_title(names[column] + baseline, fontsize=10, color="#666666", loc="left")
        lower.set_xlabel(f"time at {tokens(curves[0].shown_length())} tokens")
        if column == 0:
            upper.set_ylabel("relative error against full softmax")
            lower.set_ylabel("rounding\nonly")
    title(figure, "Error against time: lower and further left is better", context)
    remark(figure, "filled: bidirectional   hollow: causal")
    save(figure, folder, "error")


# --- decoding ---------------------------------------------------------------------------------------------------------
def decode_picture(context, curves, folder):
    figure = plt.figure(figsize=(11, 4.8))
    left, right = figure.add_axes((0.075, 0.12, 0.36, 0.68)), figure.add_axes((0.52, 0.12, 0.36, 0.68))
    for axes, key, name in ((left, "best_ms", "time of one token"),
                            (right, "of_bandwidth", "share of the memory bandwidth (states too large for the caches)")):
        ends = []
        shown = [c for c in curves if all(key in row for row in c.at.values())]
        for c in sorted(shown, key=lambda c: c.line(key)[1][-1]):
            x, y = c.line(key)
            axes.plot(x, y, color=c.colour, linewidth=2, marker="o", markersize=3.2)
            ends.append((x[-1], y[-1], c))
        length_axis(axes, curves, "tokens in the cache")
        axes.set_title(name, fontsize=10, color="#666666", loc="left")
        if key == "best_ms":
            axes.set_yscale("log")
            value_axis(axes.yaxis, seconds)
        else:
            axes.set_ylim(0, max([1.0] + [1.05 * max(c.line(key)[1]) for c in shown]))
            gap = 13 * figure.dpi / 72
            below = -math.inf
            for x, y, c in ends:
                pixel = axes.transData.transform((x, y))[1]
                below = max(pixel, below + gap)
                axes.annotate(c.operator, (x, y), xytext=(8, (below - pixel) * 72 / figure.dpi), color=c.colour,
                              textcoords="offset points", fontsize=9, fontweight="bold", va="center")
    title(figure, "Decoding: one more token", context)
    heads = context.get("heads", "8")
    remark(figure, f"{4 * int(heads)} query heads over {heads} key/value heads, aft {heads} over {heads}")
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
        curve_picture(context, whole, folder, "time", "Time against length", "best_ms", seconds, "time", 10)
        curve_picture(context, whole, folder, "memory", "Scratch memory against length", "scratch_bytes", memory,
                      "scratch", 2)
        error_picture(context, whole, folder)
    if backward:
        curve_picture(context, backward, folder, "backward", "Time of the backward pass against length", "best_ms",
                      seconds, "time", 10)
    if decode:
        decode_picture(context, decode, folder)


if __name__ == "__main__":
    main()
